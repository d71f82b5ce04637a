"""What waits to be sent until there is room for it on the lane that it goes to.

The plan says which messages wait, and until which action has ended. So a lane that is ahead of its
predicted times doesn't fill the memory of one that is behind.
"""

from collections.abc import Mapping
from itertools import accumulate
from threading import Condition

from fxpipe.runtime.mailbox import StoppedError
from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.schedule import Action, Kind, Schedule

# By what is sent, a stage's values (True) or gradients of a micro-batch, and the lane that it goes
# to: how many actions that lane must have ended.
Needs = Mapping[tuple[int, bool, int, int], int]


def needs(estimate: EstimateSpec, schedule: Schedule, m: int) -> Needs:
    """What the plan asks for where only the first `m` micro-batches of `schedule` run.

    It asks for nothing of a table that is not the one it was made with.
    """
    if [[str(action) for action in row] for row in schedule.rows] != [
        [cell.split()[0] for cell in filter(None, row.split(", "))] for row in estimate.timeline
    ]:
        return {}
    ended = {}
    for lane, row in enumerate(schedule.rows):
        for action, n in zip(row, accumulate(a.microbatch < m for a in row), strict=True):
            ended[action] = lane, n
    found = {}
    for wait in estimate.waits:
        sent, last = map(Action.parse, wait.split())
        lane, n = ended[last]
        found[sent.stage, sent.kind is Kind.FORWARD, sent.microbatch, lane] = n
    return found


class Gate:
    """One step's. Each lane tells what it has ended; any lane may wait for another."""

    def __init__(self, needs: Needs, n_lanes: int) -> None:
        self._needs = needs
        self._ended = [0] * n_lanes
        self._moved = Condition()
        self._stopped = False

    def passed(self, lane: int) -> None:
        """The lane has ended an action."""
        if not self._needs:
            return
        with self._moved:
            self._ended[lane] += 1
            self._moved.notify_all()

    def wait(self, stage: int, forward: bool, i: int, lane: int) -> None:
        """Until what `stage` has of micro-batch i may go to `lane`. Raises StoppedError."""
        n = self._needs.get((stage, forward, i, lane), 0)
        if n and self._ended[lane] < n:
            with self._moved:
                self._moved.wait_for(lambda: self._stopped or self._ended[lane] >= n)
            if self._stopped:
                raise StoppedError

    def stop(self) -> None:
        """Let nobody wait any longer."""
        with self._moved:
            self._stopped = True
            self._moved.notify_all()
