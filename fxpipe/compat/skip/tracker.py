"""Where a thread's layers find what others of its layers have stashed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fxpipe.compat.skip.namespace import Namespace

Skip = tuple[Namespace | None, str]


class SkipTracker:
    """What has been stashed and not yet popped."""

    def __init__(self, tensors: dict[Skip, Tensor | None] | None = None) -> None:
        self.tensors: dict[Skip, Tensor | None] = tensors or {}


class _Thread(threading.local):
    def __init__(self) -> None:
        # Of layers that run outside of any pipe.
        self.tracker = SkipTracker()


_THREAD = _Thread()


def current_skip_tracker() -> SkipTracker:
    """This thread's tracker."""
    return _THREAD.tracker


@contextmanager
def use_skip_tracker(tracker: SkipTracker) -> Iterator[None]:
    """Let this thread stash and pop there while the block runs."""
    before, _THREAD.tracker = _THREAD.tracker, tracker
    try:
        yield
    finally:
        _THREAD.tracker = before
