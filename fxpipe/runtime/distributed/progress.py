"""Where a rank is in its work: noted by the thread that works, read by those that watch."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fxpipe.runtime.distributed.messages import Row
from fxpipe.schedule import Action

_SHOWN = 3  # of the last actions
OTHERS = "the other ranks"
START, EVALUATION = "the start", "evaluation"
# What a rank is asked to do together with the others, which tell each other its place here.
WORKS = (
    *(START, "step", EVALUATION, "step of closures", "clip_grad_norm_"),
    *("load_weights", "save_weights", "checkpoint.save", "checkpoint.load"),
)


def _others() -> str:
    return OTHERS


class Progress:
    """Of one rank. To note an action takes one assignment: all else is worked out when asked for.

    `work` is what it does; `item` is the item of its row that it is at; `awaited` tells what it
    would wait for.
    """

    def __init__(self) -> None:
        self.item = 0
        self.awaited: Callable[[], str | None] = _others
        self._row: Row = ()
        self._inside = True
        self.work = START
        self._counts: Counter[str] = Counter()
        self._waits: str | None = None
        self._since = 0.0

    def begin(self, work: str) -> None:
        """The rank begins one of `WORKS`, as it was asked to by its script."""
        self._counts[work] += 1
        self._row = ()
        self.work = work

    @contextmanager
    def running(self, row: Row, awaited: Callable[[], str | None]) -> Iterator[None]:
        """The block runs `row`, which waits for what is `awaited`, if for anything."""
        self.item, self._row, self.awaited = 0, row, awaited
        try:
            yield
        finally:
            self.awaited = _others

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The block is the pipeline's, not its caller's."""
        self._inside = True
        yield
        self._inside = False

    def wait_for(self, what: str | None) -> float:
        """The rank is seen to wait for `what`, or for nothing: since how many seconds."""
        if what != self._waits:
            self._waits, self._since = what, time.monotonic()
        return 0.0 if what is None else time.monotonic() - self._since

    @property
    def waiting(self) -> str | None:
        """What it waits for, and for how long; None if for nothing."""
        waits, since = self._waits, self._since
        return None if waits is None else f"waits for {waits}, for {time.monotonic() - since:.0f} s"

    @property
    def doing(self) -> str:
        """Its work, and which since the start: `step 8`."""
        return self.work if self.work == START else f"{self.work} {self._counts[self.work]}"

    def __str__(self) -> str:
        row, place, waits, work = self._row, self.item, self._waits, self.doing
        done = [str(item) for item in row[:place] if isinstance(item, Action)]
        last = f", did {', '.join(done[-_SHOWN:])} last" if done else ""
        if not self._inside:
            return f"is outside of the pipeline, after {work}{last}"
        # What a lost rank was to send is waited for in the action that needs it.
        begun = not waits and place < len(row) and isinstance(row[place], Action)
        at = f" at {row[place]}" if begun else ""
        return f"is in {work}{at}{last}" + (f", waits for {waits}" if waits else "")
