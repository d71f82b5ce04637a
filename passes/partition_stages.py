"""What the stages of cuts cost, and what they send each other."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fxpipe.ir import Chain, Value
from fxpipe.passes.partition_blocks import Crossing, held_at_rest, stage_cost
from fxpipe.passes.simulate_costs import Message, StageCost


def stage_costs(
    chain: Chain, cuts: Sequence[int], training_factor: float = 1.0
) -> tuple[tuple[StageCost, ...], tuple[Message, ...]]:
    """`StageCosts` of one choice of cuts."""
    return StageCosts(chain, training_factor)(cuts)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A run of blocks as a stage, whatever the others are.

    What it holds between steps is by name, and of what earlier ones make it reads `received`.
    """

    cost: StageCost
    static: dict[str, int]
    received: tuple[Value, ...]


class StageCosts:
    """What stages of a chain cost on one micro-batch, and what they send each other, by cuts.

    What a run of blocks costs is found once, so that cuts near others are soon told.
    """

    def __init__(self, chain: Chain, training_factor: float = 1.0) -> None:
        """Training keeps so many bytes of gradients and optimizer states by byte of parameters."""
        self._chain = chain
        self._training_factor = training_factor
        self._values = {value.name: value for value in chain.values}
        # By block, and, past the last, by the caller.
        self._read: list[list[Value]] = [[] for _ in range(len(chain.blocks) + 1)]
        for value in chain.values:
            for k in value.consumers:
                self._read[k].append(value)
        self._found: dict[tuple[int, int], _Stage] = {}

    def __call__(self, cuts: Sequence[int]) -> tuple[tuple[StageCost, ...], tuple[Message, ...]]:
        """Of the stages that these cuts make.

        Storages of the same name count once a stage. A value goes straight from its producer's
        stage to each stage that reads it, one of the model's outputs to the last, where the loss is
        taken; a received value that a backward saves is counted as received.
        """
        bounds = (0, *cuts, len(self._chain.blocks))
        found = [self._stage(begin, end) for begin, end in pairwise(bounds)]
        holders = Counter(name for stage in found for name in stage.static)
        stages = tuple(
            replace(stage.cost, shared=shared) if shared else stage.cost
            for stage in found
            for shared in [tuple((n, size) for n, size in stage.static.items() if holders[n] > 1)]
        )
        sent: dict[tuple[int, int], list[Value]] = {}
        for target, stage in enumerate(found):
            for value in stage.received:
                source = bisect_right(bounds, value.producer) - 1
                sent.setdefault((source, target), []).append(value)
        messages = tuple(
            # A bare chain's blocks need nothing, and its stages hold what they save.
            _message(*pair, values, bounds, hands=stages[pair[0]].backward_workspace_bytes > 0)
            for pair, values in sorted(sent.items())
        )
        return stages, messages

    def _stage(self, begin: int, end: int) -> _Stage:
        if (begin, end) not in self._found:
            crossing, received = self._crossing(begin, end)
            static = held_at_rest(self._chain, begin, end, self._training_factor)
            held = sum(static.values())
            cost = stage_cost(self._chain, self._values, begin, end, crossing, held)
            self._found[begin, end] = _Stage(cost, static, received)
        return self._found[begin, end]

    def _crossing(self, begin: int, end: int) -> tuple[Crossing, tuple[Value, ...]]:
        """What crosses the ends of the stage of the blocks [begin, end), and what it receives."""
        crossing, received = Crossing(), []
        read = {value.name: value for k in range(begin, end) for value in self._read[k]}
        only_returned: dict[str, Value] = {}
        if end == len(self._chain.blocks):
            # The caller takes the model's output from the last stage and gives its gradient.
            made = [value for value in self._read[end] if value.producer >= 0]
            crossing.caller_bytes = sum(value.bytes for value in made if value.gradient)
            only_returned = {v.name: v for v in self._read[end] if v.name not in read}
        for value in (*read.values(), *only_returned.values()):
            if value.producer >= begin:
                continue
            crossing.sends_back |= value.gradient
            if value.producer < 0:
                crossing.given[value.name] = value.bytes
                continue
            crossing.received[value.name] = value.bytes
            received.append(value)
            if value.name in only_returned:
                crossing.returned_bytes += value.bytes
        return crossing, tuple(received)


def _message(
    source: int, target: int, values: Sequence[Value], bounds: Sequence[int], hands: bool
) -> Message:
    back = [value.bytes for value in values if value.gradient]
    end = bounds[-1]
    if target == len(bounds) - 2:
        # Of what the last stage reads as well, the caller's gradient comes by itself.
        returned = [value for value in values if value.gradient and value.consumers[-1] == end]
        back += [v.bytes for v in returned if any(bounds[-2] <= k < end for k in v.consumers)]
    n_bytes = sum(value.bytes for value in values)
    return Message(
        source,
        target,
        n_bytes,
        sum(back) if back else None,
        handed_bytes=n_bytes if hands else 0,
        values=len(values),
        gradients=len(back),
    )
