"""What a process says that is told to end, as torchrun tells all once one of them has died."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def last_words(words: Callable[[], str]) -> Iterator[None]:
    """If SIGTERM ends the process within the block, let it say `words` first.

    A program that handles the signal itself goes on doing so.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        os.write(2, f"{words()}\n".encode())  # the interrupted code may be printing
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
