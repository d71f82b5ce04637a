"""What lanes have to themselves while they run: their pipeline, and settings of the process."""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fxpipe.runtime.attention import kernels_in_order, let_take

# How long a lane may keep Python from the others; Python's own 5 ms are many small ops.
_SWITCH_S = 5e-4

_lock = threading.Lock()
_settings: list[tuple[float, bool, tuple[str, ...]]] = []  # as the first of those found them
_running = 0


class Turn:
    """Calls of one pipeline by several threads, one after the other. A copy has its own."""

    def __init__(self) -> None:
        self._taken, self._process = threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():  # forked off, without the thread that may have it
            self._taken, self._process = threading.RLock(), os.getpid()
        self._taken.acquire()

    def __exit__(self, *_: object) -> None:
        self._taken.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Turn, ()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Meanwhile threads change often, and nothing is collected.

    One collection of what torch has loaded takes longer than most actions, and all lanes and ranks
    would wait for it. What was set before holds again when no pipeline runs any more.
    """
    global _running
    with _lock:
        _running += 1
        if _running == 1:
            _settings.append((sys.getswitchinterval(), gc.isenabled(), kernels_in_order()))
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if _running == 0:
                _put_back()


def _put_back() -> None:
    interval, collecting, kernels = _settings.pop()
    if collecting:
        gc.enable()
    sys.setswitchinterval(interval)
    let_take(kernels)


def _alone() -> None:
    """In a process that was forked off no pipeline runs, whatever ran in the other one."""
    global _lock, _running
    _lock, _running = threading.Lock(), 0
    if _settings:
        _put_back()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_alone)
