"""The two forwards of recomputation: under what settings they run, and how code in them can tell.

Names after torchgpipe: checkpointing is the first forward, without a graph; recomputing the second.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fxpipe.runtime.ambient import Ambient


class _Thread(threading.local):
    checkpointing = False
    recomputing = False


_THREAD = _Thread()


def is_checkpointing() -> bool:
    """Whether this thread runs a forward that will be run again in backward."""
    return _THREAD.checkpointing


def is_recomputing() -> bool:
    """Whether this thread runs a forward again: what it counts has been counted before."""
    return _THREAD.recomputing


@contextmanager
def checkpointing(ambient: Ambient) -> Iterator[None]:
    """Run a block as the first of two forwards, without a graph."""
    before = _THREAD.checkpointing, _THREAD.recomputing
    _THREAD.checkpointing, _THREAD.recomputing = True, False
    try:
        # A cast of a parameter cached without grad would serve later micro-batches without grad.
        with torch.no_grad(), ambient.autocasting(cache=False):
            yield
    finally:
        _THREAD.checkpointing, _THREAD.recomputing = before


@contextmanager
def recomputing(ambient: Ambient) -> Iterator[None]:
    """Run a block as the second of two forwards, with its graph."""
    before = _THREAD.checkpointing, _THREAD.recomputing
    _THREAD.checkpointing, _THREAD.recomputing = False, True
    try:
        with torch.enable_grad(), ambient.autocasting(ambient.autocast_cache):
            yield
    finally:
        _THREAD.checkpointing, _THREAD.recomputing = before


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers that change where a tensor is written in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
