"""A user's closure on one micro-batch, which pauses where it calls the pipeline.

It has a thread of its own, since it is to stand in the middle of the user's code while other
micro-batches go on; but it runs only while `resume` waits for it, so that of all closures one runs
at a time.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from fxpipe.runtime import stream
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.stream import Stream

_RUNNING = threading.local()


class AbandonedError(BaseException):
    """Ends a closure whose step has failed elsewhere; no `except Exception` catches it."""


class Closure:
    """`function()` on a thread of its own, under the settings of the thread that makes this.

    After `resume`, either `done` is true and `result` is what it returned, or it stands at a call
    of a pipeline: `call` says of which and with what.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.done = False
        self.result: Any = None
        self.call: Any = None
        self._function: Callable[[], Any] | None = function
        self._failure: BaseException | None = None
        self._ambient = Ambient.capture()
        self._n_threads = torch.get_num_threads()
        # The thread begins on the caller's device and stream; the pipeline's join them at its call.
        self._streams = stream.current_streams()
        self._settings = ExitStack()
        self._thread: threading.Thread | None = None
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._turn: SimpleQueue[None] = SimpleQueue()

    def resume(self, answer: Any = None) -> None:
        """Run it to its next call, with `answer` to the last one, or to its end.

        Raises what it raises.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="fxpipe closure", daemon=True)
            self._thread.start()
        self.call = None
        self._answers.put(answer)
        self._turn.get()
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # its traceback holds this frame

    def ask(self, call: Any) -> Any:
        """On the closure's thread: pause at `call`; gives the answer."""
        self.call = call
        self._turn.put(None)
        answer = self._answers.get()
        if isinstance(answer, AbandonedError):
            self.abandon()  # again, should it call again as it ends
            raise answer
        return answer

    def use_streams(self, streams: Sequence[Stream]) -> None:
        """On the closure's thread: compute on these from now on."""
        self._settings.enter_context(stream.use_streams([*stream.current_streams(), *streams]))

    def abandon(self) -> None:
        """Have it end where it stands, or as it begins."""
        self._answers.put(AbandonedError())

    def join(self) -> None:
        """Wait until it has ended, if it has begun."""
        # One whose start was interrupted may begin yet: to its end then, since it was abandoned.
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        answer = self._answers.get()
        try:
            assert self._function is not None
            if not isinstance(answer, AbandonedError):
                with self._ambient.entered(), self._settings:
                    stream.use_threads(self._n_threads)
                    self.use_streams(self._streams)
                    _RUNNING.closure = self
                    self.result = self._function()
        except AbandonedError:
            pass
        except BaseException as error:
            self._failure = error
        self._function = None
        self.done = True
        self._turn.put(None)


def running() -> Closure | None:
    """The closure that this thread runs."""
    return getattr(_RUNNING, "closure", None)


@contextmanager
def abandoning(closures: Sequence[Closure]) -> Iterator[None]:
    """End, when the block ends, all closures that have not."""
    try:
        yield
    finally:
        # All, before a wait that a second Ctrl-C may end.
        for closure in closures:
            closure.abandon()
        for closure in closures:
            closure.join()
