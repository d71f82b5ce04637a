"""`torchgpipe.checkpoint`."""

from fxpipe.runtime.recomputing import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
