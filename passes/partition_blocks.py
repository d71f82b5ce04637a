"""What a run of blocks costs as a stage: its blocks summed up, whatever the other stages are."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil

from fxpipe.ir import Block, Chain, Value
from fxpipe.passes import checkpoints
from fxpipe.passes.simulate_costs import StageCost

# Of what a stage holds at rest and saves: what an allocator rounds up and can't use between blocks,
# and memory that a view keeps whole. Chosen so that no peak that benchmarks/predictions.py measured
# was higher than predicted.
FRAGMENTATION = 0.025


@dataclass
class Crossing:
    """What crosses a stage's ends, in bytes by name, and is counted by itself.

    `given` are the model's inputs that it reads.
    """

    given: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    returned_bytes: int = 0  # of it, what only the caller reads
    caller_bytes: int = 0  # gradients of the model's output, from the end of F
    sends_back: bool = False


def stage_cost(
    chain: Chain,
    values: Mapping[str, Value],
    begin: int,
    end: int,
    crossing: Crossing,
    static_bytes: int,
) -> StageCost:
    """Of the blocks [begin, end), which hold `static_bytes` between steps.

    `values` are the chain's, by name.
    """
    blocks = chain.blocks[begin:end]
    action_ms = chain.action_ms
    backward_ms = action_ms + sum(block.backward_ms for block in blocks)
    saved = {name: size for block in blocks for name, size in block.saved}
    # What comes in is counted by itself: of two views of one memory, each.
    coming = crossing.given | crossing.received
    memories = {values[name].memory for name in coming}
    saved_bytes = sum(size for name, size in saved.items() if name not in memories)
    cost = StageCost(
        forward_ms=action_ms + sum(block.forward_ms for block in blocks),
        backward_ms=backward_ms,
        static_bytes=static_bytes,
        saved_bytes=saved_bytes,
        input_bytes=sum(crossing.given.values()) + crossing.caller_bytes,
        # Where nobody waits for a gradient, W does it all: no half of it could be left out.
        weight_gradient_ms=backward_ms,
        halving_ms=action_ms,
        written_bytes=sum(block.written_bytes for block in blocks),
    )
    if crossing.sends_back:
        cost = replace(
            cost,
            weight_gradient_ms=action_ms + sum(block.weight_gradient_ms for block in blocks),
            arriving_bytes=sum(block.arriving_bytes for block in blocks),
            halving_ms=action_ms + sum(block.halving_ms for block in blocks),
        )
    if not any(b.forward_workspace_bytes or b.backward_workspace_bytes for b in blocks):
        return cost  # a bare chain's blocks need nothing, and what their stages receive stays
    forward, backward = _workspaces(blocks, begin, values)
    share = ceil(FRAGMENTATION * (static_bytes + saved_bytes))
    of_inputs = of_weights = backward
    released = 0
    if crossing.sends_back:
        # It is there in I and gone in W: what arrives, from I on, is less by it, and I needs it.
        released = min(cost.arriving_bytes, _released(blocks, memories))
        # What blocks behind have saved stays for W, in which no gradients are on their way. What
        # arrives at blocks before is not there yet.
        yet = accumulate((block.arriving_bytes for block in blocks), initial=0)
        of_inputs = max(
            max(0, block.input_workspace_bytes - _returning(block, k, end, values) - before)
            for (k, block), before in zip(enumerate(blocks, begin), yet, strict=False)
        )
        of_weights = max(block.weight_workspace_bytes for block in blocks)
    return replace(
        cost,
        forward_workspace_bytes=forward + share,
        backward_workspace_bytes=max(1, backward + share),
        input_workspace_bytes=of_inputs + released + share,
        weight_workspace_bytes=of_weights + share,
        loss_bytes=blocks[-1].loss_bytes + share,
        arriving_bytes=cost.arriving_bytes - released,
        passing_bytes=sum(
            size for name, size in coming.items() if values[name].memory not in saved
        ),
        returned_bytes=crossing.returned_bytes,
    )


def _released(blocks: Sequence[Block], coming: Set[str]) -> int:
    """What the blocks behind the last that has weights save, and no other: no W needs it.

    The memories of what is `coming` into the stage are there to its backward's end.
    """
    with_weights = [
        k for k, block in enumerate(blocks) if block.weight_gradient_ms or block.arriving_bytes
    ]
    end = max(with_weights, default=-1) + 1
    kept = {name for block in blocks[:end] for name, _ in block.saved}
    kept |= coming
    return sum({n: size for b in blocks[end:] for n, size in b.saved if n not in kept}.values())


def held_at_rest(chain: Chain, begin: int, end: int, training_factor: float) -> dict[str, int]:
    """What the blocks [begin, end) hold between steps, by name."""
    blocks = chain.blocks[begin:end]
    held = {name: size for block in blocks for name, size in block.buffers}
    for block in blocks:
        held.update((name, ceil((1 + training_factor) * size)) for name, size in block.parameters)
    return held


def _workspaces(
    blocks: Sequence[Block], begin: int, values: Mapping[str, Value]
) -> tuple[int, int]:
    """What a stage's blocks need at the fullest, forward and backward, besides what else counts.

    While a block runs, blocks behind it have saved nothing yet, or it is gone again. (Of a backward
    in halves it stays for the second.) What earlier stages made is counted as received, or it goes
    straight to a later stage.
    """
    own = {op for block in blocks for op in block.ops}
    first = {name: k for k in reversed(range(len(blocks))) for name, _ in blocks[k].saved}
    adding = _adding(blocks)
    forward = backward = behind = 0
    for k in reversed(range(len(blocks))):
        earlier = (values[name] for name in blocks[k].waiting if name in values)
        waiting = sum(value.bytes for value in earlier if value.producer < begin)
        returning = _returning(blocks[k], begin + k, begin + len(blocks), values)
        forward = max(forward, blocks[k].forward_workspace_bytes - behind - waiting)
        needed = blocks[k].backward_workspace_bytes + adding[k]
        backward = max(backward, needed - behind - returning)
        behind += sum(
            size
            for name, size in blocks[k].saved
            if first[name] == k and name.partition("/")[0] in own
        )
    return forward, backward


def _adding(blocks: Sequence[Block]) -> list[int]:
    """By block, what is there in its backward of the gradients of weights that several blocks read.

    Such a one adds up from the last of them to the first: autograd makes each sum beside what it is
    of.
    """
    readers: dict[str, list[int]] = {}
    for k, block in enumerate(blocks):
        for name, _ in block.trained:
            readers.setdefault(name, []).append(k)
    found, beside = [0] * len(blocks), [0] * len(blocks)
    sizes = dict(one for block in blocks for one in block.trained)
    for name, places in readers.items():
        if len(places) > 1:
            for k in range(places[0], places[-1] + 1):
                found[k] += sizes[name]
            for k in places[:-1]:
                beside[k] = max(beside[k], sizes[name])
    return [sum(both) for both in zip(found, beside, strict=True)]


def _returning(block: Block, k: int, end: int, values: Mapping[str, Value]) -> int:
    """Of what `block`, the chain's k-th, needs backward: gradients that no block behind it gives.

    These come from other stages, and count as received, or go straight to an earlier one.
    """
    returning = (values[name] for name in block.returning if name in values)
    return sum(value.bytes for value in returning if not any(k < c < end for c in value.consumers))


def with_segments(
    chain: Chain, cost: StageCost, begin: int, end: int, segments: checkpoints.Segments
) -> StageCost:
    """The stage of the blocks [begin, end), of this cost otherwise, if it has these segments."""
    if not segments:
        return cost
    found = checkpoints.segment_cost(chain, begin, end, segments)
    forward = cost.forward_workspace_bytes
    return replace(
        cost,
        saved_bytes=found.kept_bytes + cost.written_bytes,
        again_bytes=found.again_bytes,
        again_ms=found.again_ms,
        # Between its halves a backward holds all that was computed again.
        arriving_bytes=cost.arriving_bytes + found.all_again_bytes - found.again_bytes,
        passing_bytes=cost.returned_bytes,  # from the rest a segment may compute again
        backward_workspace_bytes=max(cost.backward_workspace_bytes, forward),
        input_workspace_bytes=max(cost.input_workspace_bytes, forward),
    )
