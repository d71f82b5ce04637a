"""Shows on standard error which pass runs, and how long each took."""

import time
from types import TracebackType

from rich.console import Console
from rich.status import Status


class Progress:
    """Called with a pass's name as it starts. On a terminal the running pass has a spinner."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._name: str | None = None
        self._started = 0.0

    def __call__(self, name: str) -> None:
        """Pass `name` starts, the one before has ended; `name: text` tells of one that runs."""
        if (
            self._name is not None
            and self._status is not None
            and name.startswith(f"{self._name}: ")
        ):
            self._status.update(name)
            return
        self._end()
        self._name, self._started = name, time.perf_counter()
        self._status = self._console.status(name)
        self._status.start()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._end()
        elif self._status is not None:
            self._status.stop()

    def _end(self) -> None:
        if self._status is not None:
            self._status.stop()
            seconds = time.perf_counter() - self._started
            self._console.print(f"{self._name:<12}{seconds:.2f} s")


class BestSoFar:
    """Called with the step in ms of each plan that is better than the ones before."""

    def __init__(self) -> None:
        self._status = Console(stderr=True, highlight=False).status("searching")
        self._started = time.perf_counter()

    def __call__(self, step_ms: float) -> None:
        """A better plan."""
        seconds = time.perf_counter() - self._started
        self._status.update(f"searching: best step so far {step_ms:.3f} ms, after {seconds:.1f} s")

    def __enter__(self) -> "BestSoFar":
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
