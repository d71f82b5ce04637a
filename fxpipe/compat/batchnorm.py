"""`torchgpipe.batchnorm`."""

from fxpipe.runtime.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
