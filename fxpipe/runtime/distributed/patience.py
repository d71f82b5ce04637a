"""How long a rank waits for others: until one has failed, is lost or is too late."""

import re
import threading
from collections.abc import Callable, Iterable

from fxpipe.runtime.distributed.board import Board
from fxpipe.runtime.distributed.failures import Failures
from fxpipe.runtime.distributed.progress import Progress
from fxpipe.runtime.distributed.worker import Trouble

LOOK_S = 0.3  # how often one who waits looks whether it should


class Patience:
    """Of a rank that waits `timeout_s` seconds; `near` are the ranks whose places it then tells.

    Where any may be the lost one, it tells those of all. `trouble` is what waits for others
    have raised.
    """

    def __init__(
        self,
        timeout_s: float,
        board: Board,
        progress: Progress,
        failures: Failures,
        trouble: Trouble,
    ) -> None:
        self.near = range(board.size)
        self._timeout_s = timeout_s
        self._board = board
        self._progress = progress
        self._failures = failures
        self._trouble = trouble
        self._late = False

    def look(self, awaited: str | None) -> None:
        """Go on waiting for what is `awaited`, or raise StageError."""
        waited_s = self._progress.wait_for(awaited)
        self._failures.look()
        if self._trouble:
            partner, error = self._trouble[0]
            if not isinstance(error, RuntimeError):
                raise error
            raise self._failures.lose(
                f"has lost {partner or 'another rank'}, whose process has ended or can't be "
                f"reached ({_cause(error)}), "
                f"while it {self._progress.waiting or 'waits for nothing'}",
                1,
                self.near if partner else range(self._board.size),
            )
        late = waited_s > self._timeout_s / 2
        if late and not self._late:
            self._board.sample()
        self._late = late
        if waited_s > self._timeout_s:
            raise self._failures.lose(str(self._progress.waiting), near=self.near)


def wait_checking(events: Iterable[threading.Event], check: Callable[[], None]) -> None:
    """Return once all are set; `check` may raise meanwhile."""
    for event in events:
        while not event.wait(LOOK_S):
            check()


def _cause(error: RuntimeError) -> str:
    """What gloo says, without where in its code and what to do about it."""
    text = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", text)
