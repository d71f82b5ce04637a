"""What cuts cost: the chain's blocks summed up by stage, and the simulator's word on them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil

from fxpipe.ir import Chain, CheckpointMode, Estimate, Network, StageEstimate, Value
from fxpipe.passes import checkpoints
from fxpipe.passes.simulate import Message, StageCost, simulate
from fxpipe.schedule import Kind, Schedule

Cuts = tuple[int, ...]

# Of what a stage holds at rest and saves: what an allocator rounds up and can't use between blocks,
# and memory that a view keeps whole, as the gradient of a concatenation does. Chosen so that no
# peak that benchmarks/predictions.py measured was higher than predicted.
FRAGMENTATION = 0.025


def evaluate(
    chain: Chain,
    cuts: Cuts,
    *,
    schedule: Schedule,
    checkpoint: tuple[CheckpointMode, ...],
    network: Network,
    training_factor: float = 1.0,
    segments: Sequence[checkpoints.Segments] = (),
) -> Estimate:
    """What the simulator predicts of `chain` cut at `cuts` under `schedule`."""
    stages, messages = stage_costs(chain, cuts, training_factor)
    if any(segments):
        bounds = pairwise((0, *cuts, len(chain.blocks)))
        stages = tuple(
            _with_segments(chain, cost, begin, end, own)
            for cost, (begin, end), own in zip(stages, bounds, segments, strict=True)
        )
    recompute = checkpoints.recompute_table(checkpoint, schedule.n_microbatches)
    simulation = simulate(schedule, stages, messages, network, recompute)
    received = Counter[int]()
    for message in messages:
        received[message.target] += message.bytes
    return Estimate(
        step_ms=simulation.step_ms,
        bubble=simulation.bubble,
        peak_bytes=simulation.peak_bytes,
        spans=simulation.spans,
        memory=simulation.memory,
        critical=simulation.critical,
        stages=tuple(
            StageEstimate(
                forward_ms=stage.forward_ms,
                backward_ms=stage.backward_ms,
                parameter_bytes=parameter_bytes(chain, begin, end),
                saved_bytes=stage.saved_bytes,
                received_bytes=stage.input_bytes + received[j],
            )
            for j, (stage, (begin, end)) in enumerate(
                zip(stages, pairwise((0, *cuts, len(chain.blocks))), strict=True)
            )
        ),
    )


def edges_of(chain: Chain) -> tuple[int, ...]:
    """0, each place where a stage may begin, and the end."""
    inner = (k + 1 for k in range(len(chain.blocks) - 1) if chain.cuttable[k])
    return (0, *inner, len(chain.blocks))


def crossing(chain: Chain) -> tuple[list[int], list[int]]:
    """By place, before block k at k: how many values cross it, and their bytes."""
    n_values, n_bytes = ([0] * (len(chain.blocks) + 1) for _ in range(2))
    for value in chain.values:
        inside = [k for k in value.consumers if k < len(chain.blocks)]
        if value.producer >= 0 and inside:
            for k in range(value.producer + 1, max(inside) + 1):
                n_values[k] += 1
                n_bytes[k] += value.bytes
    return n_values, n_bytes


def parameter_bytes(chain: Chain, begin: int, end: int) -> int:
    """Bytes of the parameters of the blocks [begin, end), each once."""
    blocks = chain.blocks[begin:end]
    return sum(dict(one for block in blocks for one in block.parameters).values())


def stage_costs(
    chain: Chain,
    cuts: Cuts,
    training_factor: float = 1.0,
) -> tuple[tuple[StageCost, ...], tuple[Message, ...]]:
    """What each stage costs on one micro-batch, and what the stages send each other.

    Training keeps `training_factor` bytes of gradients and optimizer states by byte of parameters.
    Storages of the same name count once a stage. A value goes straight from its producer's stage to
    each stage that reads it; a received value that a backward saves is counted as received.
    """
    bounds = (0, *cuts, len(chain.blocks))
    stage_of = [j for j in range(len(bounds) - 1) for _ in range(bounds[j], bounds[j + 1])]
    n_stages = len(bounds) - 1
    received: list[set[str]] = [set() for _ in range(n_stages)]
    sends_back = [False] * n_stages
    saved = [
        {name for block in chain.blocks[begin:end] for name, _ in block.saved}
        for begin, end in pairwise(bounds)
    ]
    static = [_static(chain, begin, end, training_factor) for begin, end in pairwise(bounds)]
    holders = Counter(name for held in static for name in held)
    input_bytes, passing_bytes = [0] * n_stages, [0] * n_stages
    sent: dict[tuple[int, int], list[Value]] = {}
    for value in chain.values:
        source = stage_of[value.producer] if value.producer >= 0 else -1
        # A consumer past the last block is the caller, who takes the model's output and gives its
        # gradient, at the end of F.
        if value.gradient and source >= 0 and value.consumers[-1] == len(stage_of):
            input_bytes[source] += value.bytes
        targets = {stage_of[k] for k in value.consumers if k < len(stage_of)} - {source}
        for target in sorted(targets):
            received[target].add(value.name)
            sends_back[target] = sends_back[target] or value.gradient
            if source < 0:
                input_bytes[target] += value.bytes
                continue
            if value.name not in saved[target]:
                passing_bytes[target] += value.bytes
            sent.setdefault((source, target), []).append(value)
    stages = tuple(
        _stage_cost(
            chain,
            bounds[j],
            bounds[j + 1],
            received[j],
            input_bytes[j],
            passing_bytes[j],
            sends_back[j],
            sum(static[j].values()),
            tuple((name, size) for name, size in static[j].items() if holders[name] > 1),
        )
        for j in range(n_stages)
    )
    messages = tuple(
        # A bare chain's blocks need nothing, and its stages hold what they save.
        _message(*pair, values, hands=stages[pair[0]].workspace_bytes > 0)
        for pair, values in sorted(sent.items())
    )
    return stages, messages


def _message(source: int, target: int, values: Sequence[Value], hands: bool) -> Message:
    back = [value.bytes for value in values if value.gradient]
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


def _stage_cost(
    chain: Chain,
    begin: int,
    end: int,
    received: set[str],
    input_bytes: int,
    passing_bytes: int,
    sends_back: bool,
    static_bytes: int,
    shared: tuple[tuple[str, int], ...],
) -> StageCost:
    blocks = chain.blocks[begin:end]
    action_ms = chain.action_ms
    backward_ms = action_ms + sum(block.backward_ms for block in blocks)
    weight_gradient_ms = action_ms + sum(block.weight_gradient_ms for block in blocks)
    halving_ms = action_ms + sum(block.halving_ms for block in blocks)
    saved = {name: size for block in blocks for name, size in block.saved if name not in received}
    needed = workspace_bytes(chain, begin, end)
    of_inputs = of_weights = needed
    saved_bytes = sum(saved.values())
    if needed:
        # While F runs, what only passes is there too. A bare chain's blocks need nothing, and what
        # their stages receive stays.
        share = ceil(FRAGMENTATION * (static_bytes + saved_bytes))
        needed += passing_bytes + share
        of_inputs = of_weights = needed
        # Where nobody waits for a gradient, W does it all: no half of it could be left out.
        if sends_back:
            # What blocks behind have saved stays for W, in which no gradients are on their way.
            of_inputs = max(block.input_workspace_bytes for block in blocks) + passing_bytes + share
            of_weights = max(block.weight_workspace_bytes for block in blocks) + share
    return StageCost(
        forward_ms=action_ms + sum(block.forward_ms for block in blocks),
        backward_ms=backward_ms,
        static_bytes=static_bytes,
        saved_bytes=saved_bytes,
        input_bytes=input_bytes,
        workspace_bytes=needed,
        passing_bytes=passing_bytes if needed else 0,
        weight_gradient_ms=weight_gradient_ms if sends_back else backward_ms,
        arriving_bytes=sum(block.arriving_bytes for block in blocks) if sends_back else 0,
        halving_ms=halving_ms if sends_back else action_ms,
        written_bytes=sum(block.written_bytes for block in blocks),
        input_workspace_bytes=of_inputs,
        weight_workspace_bytes=of_weights,
        shared=shared,
    )


def _static(chain: Chain, begin: int, end: int, training_factor: float) -> dict[str, int]:
    """What the blocks [begin, end) hold between steps, by name."""
    blocks = chain.blocks[begin:end]
    held = {name: size for block in blocks for name, size in block.buffers}
    for block in blocks:
        held.update((name, ceil((1 + training_factor) * size)) for name, size in block.parameters)
    return held


def workspace_bytes(chain: Chain, begin: int, end: int) -> int:
    """What the blocks [begin, end) need on top of all that they save, at the fullest.

    While a block runs, blocks behind it have saved nothing yet, or it is gone again. (Of a backward
    in halves it stays for the second.)
    """
    blocks = chain.blocks[begin:end]
    own = {op for block in blocks for op in block.ops}
    first = {name: k for k in reversed(range(len(blocks))) for name, _ in blocks[k].saved}
    needed = behind = 0
    for k in reversed(range(len(blocks))):
        needed = max(needed, blocks[k].workspace_bytes - behind)
        behind += sum(
            size
            for name, size in blocks[k].saved
            if first[name] == k and name.partition("/")[0] in own
        )
    return needed


def _with_segments(
    chain: Chain, cost: StageCost, begin: int, end: int, segments: checkpoints.Segments
) -> StageCost:
    found = checkpoints.segment_cost(chain, begin, end, segments)
    return replace(
        cost,
        saved_bytes=found.kept_bytes + (cost.written_bytes if segments else 0),
        again_bytes=found.again_bytes,
        again_ms=found.again_ms,
        # Between its halves a backward holds all that was computed again.
        arriving_bytes=cost.arriving_bytes + found.all_again_bytes - found.again_bytes,
        passing_bytes=0,  # a segment may compute from it again
    )


def held_sets(
    schedule: Schedule, recompute: Sequence[Sequence[bool]]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each stage, how much it holds at its fullest: (saved sets, micro-batches in flight).

    Read off the table alone, so it holds for any cuts. Several pairs where neither is the larger
    in both.
    """
    held: list[set[tuple[int, int]]] = [set() for _ in range(schedule.n_stages)]
    saved, in_flight = [0] * schedule.n_stages, [0] * schedule.n_stages
    for row in schedule.rows:
        for action in row:
            j, again = action.stage, recompute[action.stage][action.microbatch]
            forward = action.kind is Kind.FORWARD
            saved[j] += not again if forward else again and action.kind.sends_back
            in_flight[j] += forward
            held[j].add((saved[j], in_flight[j]))
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                saved[j] -= 1
                in_flight[j] -= 1
    return tuple(
        tuple(
            (s, f)
            for s, f in sorted(pairs)
            if not any((a, b) != (s, f) and a >= s and b >= f for a, b in pairs)
        )
        for pairs in held
    )


def size_text(n_bytes: int) -> str:
    """Bytes in the unit that suits them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes} bytes"
