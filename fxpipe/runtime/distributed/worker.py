"""A thread for what may wait for another process: a wait in gloo can't be woken."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], object]

# Whom a wait was for, None if for any rank, and the error that said that it is lost.
Trouble = list[tuple[str | None, BaseException]]

_END_S = 0.2  # how long a thread may take to end; one that waits for a lost rank doesn't


class Worker:
    """A thread that does what it is given, in order; `trouble` gets what is raised."""

    def __init__(self, name: str, partner: str | None, trouble: Trouble) -> None:
        """`partner` is whom it may wait for; any rank if that is None."""
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        # The thread knows only its queue: what uses it can be collected while it idles.
        thread = threading.Thread(
            target=_work, args=(self._queue, partner, trouble), name=f"fxpipe {name}", daemon=True
        )
        thread.start()
        weakref.finalize(self, _end, self._queue, thread)

    def put(self, job: Job) -> None:
        """Do this after all that was given before."""
        self._queue.put(job)


def _work(queue: SimpleQueue[Job | None], partner: str | None, trouble: Trouble) -> None:
    while (job := queue.get()) is not None:
        try:
            job()
        except BaseException as error:
            trouble.append((partner, error))
            return
        del job


def _end(queue: SimpleQueue[Job | None], thread: threading.Thread) -> None:
    """Let the thread end, before Python does: torch's code in it can't be cut off."""
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_S)
