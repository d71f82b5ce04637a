"""A schedule as text and as data: one row of actions per device, cells like `0F3` and `1B0`.

The text is the compute-only table of `torch.distributed.pipelining`, which can load it: stage,
kind (F forward, B full backward, I gradient of the inputs, W gradient of the weights), micro-batch.
"""

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from fxpipe.errors import ScheduleError

_NOTHING = [""]  # the cells of a device that does nothing
_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")


class Kind(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"

    @property
    def sends_back(self) -> bool:
        """Whether the gradients of what the stage received come of it."""
        return self in (Kind.BACKWARD, Kind.INPUT)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One stage's forward, backward, or a half of its backward, on one micro-batch."""

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
                f"schedule cell {cell!r} is no action: write stage, F, B, I or W, micro-batch, "
                "as in 0F3"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch))


@dataclass(frozen=True)
class Schedule:
    """One row of actions per device, each row in the order in which that device runs it."""

    rows: tuple[tuple[Action, ...], ...]

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The stages and micro-batches whose backward is split in two, I and W."""
        return frozenset(
            (a.stage, a.microbatch) for row in self.rows for a in row if a.kind is Kind.INPUT
        )

    @cached_property
    def n_stages(self) -> int:
        """Number of stages that appear in the table."""
        return 1 + max((action.stage for row in self.rows for action in row), default=-1)

    @cached_property
    def n_microbatches(self) -> int:
        """Number of micro-batches that appear in the table."""
        return 1 + max((action.microbatch for row in self.rows for action in row), default=-1)

    @cached_property
    def stage_to_device(self) -> tuple[int, ...]:
        """By stage, the row that it stands in: the last such row, 0 where there is none."""
        places = {action.stage: d for d, row in enumerate(self.rows) for action in row}
        return tuple(places.get(stage, 0) for stage in range(self.n_stages))

    def first(self, n_microbatches: int) -> "Schedule":
        """The table of the first `n_microbatches` alone, for a smaller batch."""
        if n_microbatches >= self.n_microbatches:
            return self
        return Schedule(
            tuple(tuple(a for a in row if a.microbatch < n_microbatches) for row in self.rows)
        )

    def forwards(self) -> "Schedule":
        """The table without its backwards."""
        return Schedule(tuple(tuple(a for a in row if a.kind is Kind.FORWARD) for row in self.rows))

    def to_csv(self) -> str:
        """The table as text, one line per device: `""` for one that has nothing to do."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([str(action) for action in row] or _NOTHING for row in self.rows)
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> "Schedule":
        """Read a table; empty cells (idle) and empty lines are skipped. Raises ScheduleError."""
        # Spreadsheets begin a file in UTF-8 with a mark, and add lines to it.
        lines = csv.reader(io.StringIO(text.removeprefix("\ufeff")))
        rows = [row for row in lines if row == _NOTHING or any(cell.strip() for cell in row)]
        return cls(tuple(tuple(Action.parse(cell) for cell in row if cell.strip()) for row in rows))

    @classmethod
    def read(cls, path: str | Path) -> "Schedule":
        """Read the table in a file. Raises ScheduleError, also where the file can't be read."""
        try:
            table = cls.from_csv(Path(path).read_text(encoding="utf-8"))
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from error
        except OSError as error:
            raise ScheduleError(f"the schedule {path} can't be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ScheduleError(f"the schedule {path} can't be read: {error}") from error
        if not table.n_stages:
            raise ScheduleError(f"{path} is empty: write a row for each device, as in 0F0,0B0")
        return table

    def needs(self, action: Action) -> Iterator[Action]:
        """The actions of its own and of neighbouring stages that `action` waits for."""
        stage, kind, i = action.stage, action.kind, action.microbatch
        if kind is Kind.FORWARD:
            if stage > 0:
                yield Action(stage - 1, Kind.FORWARD, i)
            return
        if kind is Kind.WEIGHT:
            yield Action(stage, Kind.INPUT, i)
            return
        yield Action(stage, Kind.FORWARD, i)
        if stage < self.n_stages - 1:
            split = (stage + 1, i) in self.split
            yield Action(stage + 1, Kind.INPUT if split else Kind.BACKWARD, i)

    def clock(self) -> Iterator[tuple[Action | None, ...]]:
        """By clock cycle, what each device runs if every action takes one; it ends where all wait.

        Source: torchgpipe's clock-cycles (arXiv 2004.09910, section 2.2), for any table.
        """
        done: set[Action] = set()
        left = [list(reversed(row)) for row in self.rows]
        while True:
            cycle = tuple(
                row[-1] if row and done.issuperset(self.needs(row[-1])) else None for row in left
            )
            if not any(cycle):
                return
            yield cycle
            for row, action in zip(left, cycle, strict=True):
                if action is not None:
                    done.add(row.pop())


def clock_order(schedule: Schedule) -> list[Action]:
    """All actions of a table that can run, each device running at most one per clock cycle."""
    return [action for cycle in schedule.clock() for action in cycle if action is not None]
