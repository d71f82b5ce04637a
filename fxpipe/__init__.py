"""fxpipe: a compiler for pipeline parallelism in PyTorch."""
