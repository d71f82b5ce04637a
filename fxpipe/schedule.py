"""A schedule as text and as data: one row of actions per device, cells like `0F3` and `1B0`.

The text is the compute-only table of `torch.distributed.pipelining`, which can load it:
stage, kind (F forward, B full backward), micro-batch.
"""

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fxpipe.errors import ScheduleError

_CELL = re.compile(r"(\d+)([FB])(\d+)")


class Kind(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One stage's forward or backward on one micro-batch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, cell: str) -> "Action":
        """Read a cell like `0F3`. Raises ScheduleError."""
        match = _CELL.fullmatch(cell.strip())
        if match is None:
            raise ScheduleError(
                f"schedule cell {cell!r} is no action: write stage, F or B, micro-batch, as in 0F3"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch))


@dataclass(frozen=True, slots=True)
class Schedule:
    """One row of actions per device, each row in the order in which that device runs it."""

    rows: tuple[tuple[Action, ...], ...]

    @property
    def n_stages(self) -> int:
        """Number of stages that appear in the table."""
        return 1 + max((action.stage for row in self.rows for action in row), default=-1)

    @property
    def n_microbatches(self) -> int:
        """Number of micro-batches that appear in the table."""
        return 1 + max((action.microbatch for row in self.rows for action in row), default=-1)

    def to_csv(self) -> str:
        """The table as text, one line per device."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([str(action) for action in row] for row in self.rows)
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> "Schedule":
        """Read a table; empty cells (idle) are skipped. Raises ScheduleError."""
        rows = csv.reader(io.StringIO(text))
        return cls(tuple(tuple(Action.parse(cell) for cell in row if cell.strip()) for row in rows))


def needs(action: Action, n_stages: int) -> Iterable[Action]:
    """The actions of neighbouring stages and of its own that `action` must wait for."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is Kind.FORWARD:
        if stage > 0:
            yield Action(stage - 1, Kind.FORWARD, microbatch)
        return
    yield Action(stage, Kind.FORWARD, microbatch)
    if stage < n_stages - 1:
        yield Action(stage + 1, Kind.BACKWARD, microbatch)


def clock_order(schedule: Schedule) -> list[Action]:
    """All actions of a table that can run, each device running at most one per clock cycle."""
    done: list[Action] = []
    position = [0] * len(schedule.rows)
    while len(done) < sum(map(len, schedule.rows)):
        before = frozenset(done)
        for device, row in enumerate(schedule.rows):
            following = row[position[device] : position[device] + 1]
            if following and before.issuperset(needs(following[0], schedule.n_stages)):
                done.extend(following)
                position[device] += 1
    return done


def check(schedule: Schedule, stage_to_device: tuple[int, ...], n_microbatches: int) -> None:
    """Raise ScheduleError, naming every broken rule, unless the table can run.

    Rules: each stage's F and B of each micro-batch stands once, in the row of the stage's device;
    nothing else stands there; run in order, row by row, no device waits forever.
    """
    broken = _misplaced(schedule, stage_to_device, n_microbatches)
    if not broken:
        broken = _deadlock(schedule, len(stage_to_device))
    if broken:
        raise ScheduleError("the schedule table can't run:\n  " + "\n  ".join(broken))


def _misplaced(
    schedule: Schedule, stage_to_device: tuple[int, ...], n_microbatches: int
) -> list[str]:
    expected = {
        Action(stage, kind, microbatch): device
        for stage, device in enumerate(stage_to_device)
        for kind in Kind
        for microbatch in range(n_microbatches)
    }
    broken = []
    seen: set[Action] = set()
    for device, row in enumerate(schedule.rows):
        for action in row:
            if action not in expected:
                broken.append(
                    f"{action} on device {device}: the plan has {len(stage_to_device)} stages "
                    f"and {n_microbatches} micro-batches"
                )
            elif action in seen:
                broken.append(f"{action} stands twice")
            elif expected[action] != device:
                broken.append(
                    f"{action} stands on device {device}, its stage on {expected[action]}"
                )
            seen.add(action)
    broken.extend(f"{action} is missing" for action in sorted(expected.keys() - seen))
    return broken


def _deadlock(schedule: Schedule, n_stages: int) -> list[str]:
    done: set[Action] = set()
    position = [0] * len(schedule.rows)
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(schedule.rows):
            while position[device] < len(row) and done.issuperset(
                needs(row[position[device]], n_stages)
            ):
                done.add(row[position[device]])
                position[device] += 1
                moved = True
    return [
        f"device {device} waits forever at {row[position[device]]} for "
        + ", ".join(str(a) for a in needs(row[position[device]], n_stages) if a not in done)
        for device, row in enumerate(schedule.rows)
        if position[device] < len(row)
    ]
