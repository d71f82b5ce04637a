"""Each rank's row of the table with its sends and receives made explicit, and whether all can run.

A value goes once, straight from the rank that makes it, to each rank that reads it; each reader's
part of its gradient comes straight back; random numbers go on to the next stage that draws some.
Between two ranks messages arrive in the order in which they are sent, which is that of the sender's
row; a send waits for nobody.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fxpipe.errors import ScheduleError
from fxpipe.runtime.portal import CALLER, Wire, Wires
from fxpipe.schedule import Action, Kind, Schedule


@dataclass(frozen=True, slots=True)
class Message:
    """Something of micro-batch `microbatch`, from rank `source` to rank `target`.

    A "value" is for `stages`, which read it there; a "gradient" is the part of one of them; what is
    "random" is for the one of `stages` and has no wire. Stage n is the pipeline's end.
    """

    what: Literal["value", "gradient", "random"]
    wire: Wire | None
    stages: tuple[int, ...]
    microbatch: int
    source: int
    target: int

    def __str__(self) -> str:
        name = "random numbers" if self.wire is None else f"{self.what} {self.wire.value}"
        return f"{name} of micro-batch {self.microbatch} from rank {self.source} to {self.target}"


@dataclass(frozen=True, slots=True)
class Send:
    """Begin to send; nothing is waited for."""

    message: Message


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Reduce:
    """Begin to add up over replicas the gradients that are whole once stage `stage` is done."""

    stage: int


Item = Action | Send | Receive | Reduce
Row = tuple[Item, ...]


def rank_rows(
    schedule: Schedule, wires: Wires, ranks: Sequence[int], draws: Sequence[int]
) -> tuple[Row, ...]:
    """The row of each rank; `ranks` says on which each stage is, `draws` which stages draw numbers.

    What an action needs is received just before it, what it makes is sent just after it.
    """
    routes = _Routes(schedule, wires, ranks, draws)
    sent = {action: tuple(routes.sent_after(action)) for row in schedule.rows for action in row}
    awaited: dict[Action, list[Message]] = {}
    for rank, row in enumerate(schedule.rows):
        places = {action: place for place, action in enumerate(row)}
        for messages in sent.values():
            for message in messages:
                if message.target == rank:
                    first = min(routes.needed_by(message), key=places.__getitem__)
                    awaited.setdefault(first, []).append(message)
    rows: list[list[Item]] = [[] for _ in schedule.rows]
    for found, row in zip(rows, schedule.rows, strict=True):
        for action in row:
            found += [Receive(message) for message in awaited.get(action, ())]
            found.append(action)
            found += [Send(message) for message in sent[action]]
    return tuple(map(tuple, rows))


class _Routes:
    """Where what an action makes must go."""

    def __init__(
        self, schedule: Schedule, wires: Wires, ranks: Sequence[int], draws: Sequence[int]
    ) -> None:
        self._split = schedule.split
        self._trains = any(a.kind is not Kind.FORWARD for row in schedule.rows for a in row)
        self._wires = wires
        self._n = len(ranks)
        self._ranks = (*ranks, ranks[-1])  # the pipeline's end is where the last stage is
        self._draws = draws

    def sent_after(self, action: Action) -> Iterator[Message]:
        """What goes to other ranks once `action` is done."""
        j = action.stage
        if action.kind is Kind.FORWARD:
            yield from self._random(action)
            yield from self._values(action)
            if j == self._n - 1 and self._trains:
                yield from self._gradients(action, self._n)
        elif action.kind.sends_back:
            yield from self._gradients(action, j)

    def needed_by(self, message: Message) -> list[Action]:
        """The actions on the target rank that need it, one of them first."""
        i = message.microbatch
        if message.what != "gradient":
            stages = {min(j, self._n - 1) for j in message.stages}
            return [Action(j, Kind.FORWARD, i) for j in stages]
        assert message.wire is not None
        j = message.wire.source
        return [Action(j, Kind.INPUT if (j, i) in self._split else Kind.BACKWARD, i)]

    def _random(self, action: Action) -> Iterator[Message]:
        following = [j for j in self._draws if j > action.stage]
        if action.stage in self._draws and following:
            yield from self._away("random", None, following[:1], action, following[0])

    def _values(self, action: Action) -> Iterator[Message]:
        for wire, readers in self._wires.readers.items():
            if wire.source != action.stage:
                continue
            for target in dict.fromkeys(self._ranks[j] for j in readers):
                there = [j for j in readers if self._ranks[j] == target]
                yield from self._away("value", wire, there, action, there[0])

    def _gradients(self, action: Action, reader: int) -> Iterator[Message]:
        for wire in self._wires.reads[reader]:
            if wire.source != CALLER:
                yield from self._away("gradient", wire, [reader], action, wire.source)

    def _away(
        self,
        what: Literal["value", "gradient", "random"],
        wire: Wire | None,
        stages: Sequence[int],
        action: Action,
        to: int,
    ) -> Iterator[Message]:
        source, target = self._ranks[action.stage], self._ranks[to]
        if source != target:
            yield Message(what, wire, tuple(stages), action.microbatch, source, target)


def arrivals(rows: Sequence[Row], rank: int) -> dict[int, list[Message]]:
    """By rank, what comes from there to `rank`, in order."""
    found: dict[int, list[Message]] = {}
    for source, row in enumerate(rows):
        for item in row:
            if isinstance(item, Send) and item.message.target == rank:
                found.setdefault(source, []).append(item.message)
    return found


def check_messages(rows: Sequence[Row]) -> None:
    """Raise ScheduleError, with what each rank waits for, unless all rows run to their ends."""
    left = [list(reversed(row)) for row in rows]
    sent: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for row in left:
            while row and not (isinstance(row[-1], Receive) and row[-1].message not in sent):
                item = row.pop()
                moved = True
                if isinstance(item, Send):
                    sent.add(item.message)
    stuck = [
        f"rank {rank} waits forever for {row[-1].message}"
        for rank, row in enumerate(left)
        if row and isinstance(row[-1], Receive)
    ]
    if stuck:
        raise ScheduleError("\n  ".join(["the schedule table can't run:", *stuck]))
