"""Each rank's row of the table with its sends and receives made explicit.

A value goes once, straight from the rank that makes it, to each rank that reads it; each reader's
part of its gradient comes straight back; random numbers go on to the next stage that draws some.
Between two ranks messages arrive in the order in which they are sent, which is that of the sender's
row; a send waits for nobody.

Where a runner's closures run on every rank, so do the caller and the pipeline's end: outputs and
random numbers go to all ranks, and gradients of inputs do; those of outputs each rank has itself.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from fxpipe.runtime.distributed.messages import Item, Message, Receive, Row, Send
from fxpipe.runtime.portal import CALLER, Wire, Wires
from fxpipe.schedule import Action, Kind, Schedule, clock_order


def rank_rows(
    schedule: Schedule,
    wires: Wires,
    ranks: Sequence[int],
    draws: Sequence[int],
    everywhere: bool = False,
) -> tuple[Row, ...]:
    """The row of each rank; `ranks` says on which each stage is, `draws` which stages draw numbers.

    What an action needs is received just before it, what it makes is sent just after it. With
    `everywhere`, the caller and the pipeline's end are on each rank. What is for them is received
    before the first action that comes after in the order of the clock: so no rank waits for an
    action that waits for it.
    """
    routes = _Routes(schedule, wires, ranks, draws, everywhere)
    clock = clock_order(schedule) if everywhere else [a for row in schedule.rows for a in row]
    times = {action: time for time, action in enumerate(clock)}
    sent = {action: tuple(routes.sent_after(action)) for action in clock}
    awaited: dict[tuple[int, Action | None], list[Message]] = {}
    for rank, row in enumerate(schedule.rows):
        places = {action: place for place, action in enumerate(row)}
        for action, messages in sent.items():
            for message in messages:
                if message.target == rank:
                    needed = routes.needed_by(message)
                    later = (a for a in row if times[a] > times[action])
                    first = min(needed, key=places.__getitem__) if needed else next(later, None)
                    awaited.setdefault((rank, first), []).append(message)
    rows: list[list[Item]] = [[] for _ in schedule.rows]
    for rank, (found, row) in enumerate(zip(rows, schedule.rows, strict=True)):
        for action in row:
            found += [Receive(message) for message in awaited.get((rank, action), ())]
            found.append(action)
            found += [Send(message) for message in sent[action]]
        found += [Receive(message) for message in awaited.get((rank, None), ())]
    return tuple(map(tuple, rows))


class _Routes:
    """Where what an action makes must go."""

    def __init__(
        self,
        schedule: Schedule,
        wires: Wires,
        ranks: Sequence[int],
        draws: Sequence[int],
        everywhere: bool,
    ) -> None:
        self._split = schedule.split
        self._trains = any(a.kind is not Kind.FORWARD for row in schedule.rows for a in row)
        self._wires = wires
        self._n = len(ranks)
        self._everywhere = everywhere
        every = tuple(range(len(schedule.rows)))
        # By stage the ranks that have it; the pipeline's end, then the caller, come last.
        self._homes: list[tuple[int, ...]] = [(rank,) for rank in ranks]
        self._homes += [every, every] if everywhere else [(ranks[-1],), ()]
        self._draws = draws

    def sent_after(self, action: Action) -> Iterator[Message]:
        """What goes to other ranks once `action` is done."""
        j = action.stage
        if action.kind is Kind.FORWARD:
            yield from self._random(action)
            yield from self._values(action)
            if j == self._n - 1 and self._trains and not self._everywhere:
                yield from self._gradients(action, self._n)
        elif action.kind.sends_back:
            yield from self._gradients(action, j)

    def needed_by(self, message: Message) -> list[Action]:
        """The actions on the target rank that need it, one of them first."""
        i = message.microbatch
        if message.what != "gradient":
            end = [] if self._everywhere else [self._n - 1]
            stages = [k for j in message.stages for k in ([j] if j < self._n else end)]
            return [Action(j, Kind.FORWARD, i) for j in dict.fromkeys(stages)]
        assert message.wire is not None
        j = message.wire.source
        if j == CALLER:
            return []
        return [Action(j, Kind.INPUT if (j, i) in self._split else Kind.BACKWARD, i)]

    def _random(self, action: Action) -> Iterator[Message]:
        if action.stage in self._draws:
            following = next((j for j in self._draws if j > action.stage), self._n)
            if following < self._n or self._everywhere:
                for target in self._homes[following]:
                    yield from self._away("random", None, [following], action, target)

    def _values(self, action: Action) -> Iterator[Message]:
        for wire, readers in self._wires.readers.items():
            if wire.source != action.stage:
                continue
            for target in dict.fromkeys(rank for j in readers for rank in self._homes[j]):
                there = [j for j in readers if target in self._homes[j]]
                yield from self._away("value", wire, there, action, target)

    def _gradients(self, action: Action, reader: int) -> Iterator[Message]:
        for wire in self._wires.reads[reader]:
            for target in self._homes[wire.source]:
                yield from self._away("gradient", wire, [reader], action, target)

    def _away(
        self,
        what: Literal["value", "gradient", "random"],
        wire: Wire | None,
        stages: Sequence[int],
        action: Action,
        target: int,
    ) -> Iterator[Message]:
        source = self._homes[action.stage][0]
        if source != target:
            yield Message(what, wire, tuple(stages), action.microbatch, source, target)
