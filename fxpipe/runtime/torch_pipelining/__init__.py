"""A package's stages in `torch.distributed.pipelining`, and so in trainers that are built on it."""
