"""What cuts cost: the simulator's word on their stages, and what can be read off without it."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from fxpipe.ir import Chain, CheckpointMode, Estimate, Network, StageEstimate
from fxpipe.passes import checkpoints
from fxpipe.passes.partition_blocks import with_segments
from fxpipe.passes.partition_stages import stage_costs
from fxpipe.passes.simulate import simulate
from fxpipe.passes.simulate_costs import Message, StageCost
from fxpipe.passes.simulate_kernel import NOT_LAUNCHED
from fxpipe.passes.simulate_launches import Hosts
from fxpipe.schedule import Kind, Schedule

Cuts = tuple[int, ...]


def evaluate(
    chain: Chain,
    cuts: Cuts,
    *,
    schedule: Schedule,
    checkpoint: tuple[CheckpointMode, ...],
    network: Network,
    training_factor: float = 1.0,
    segments: Sequence[checkpoints.Segments] = (),
    hosts: Hosts | None = None,
) -> Estimate:
    """What the simulator predicts of `chain` cut at `cuts` under `schedule`.

    Devices wait for `hosts` where these are given.
    """
    stages, messages = segmented_costs(chain, cuts, training_factor, segments)
    recompute = checkpoints.recompute_table(checkpoint, schedule.n_microbatches)
    launched = NOT_LAUNCHED
    if hosts is not None:
        launched = hosts.launched(chain, cuts, schedule, recompute, segments)
    simulation = simulate(schedule, stages, messages, network, recompute, launched=launched)
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


def segmented_costs(
    chain: Chain,
    cuts: tuple[int, ...],
    training_factor: float,
    segments: Sequence[checkpoints.Segments],
) -> tuple[tuple[StageCost, ...], tuple[Message, ...]]:
    """What stages cost of which `segments` are computed again, and what they send each other."""
    stages, messages = stage_costs(chain, cuts, training_factor)
    if any(segments):
        bounds = pairwise((0, *cuts, len(chain.blocks)))
        stages = tuple(
            with_segments(chain, cost, begin, end, own)
            for cost, (begin, end), own in zip(stages, bounds, segments, strict=True)
        )
    return stages, messages


def edges_of(chain: Chain) -> tuple[int, ...]:
    """0, each place where a stage may begin, and the end."""
    inner = (k + 1 for k in range(len(chain.blocks) - 1) if chain.cuttable[k])
    return (0, *inner, len(chain.blocks))


def too_few_blocks(n_stages: int, n_blocks: int) -> str:
    """Why there is no such plan."""
    return (
        f"{n_stages} stages, but the model has only {n_blocks} "
        f"{'block' if n_blocks == 1 else 'blocks'} that can be cut apart: use at most {n_blocks}, "
        "one for each device and loop"
    )


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
    return f"{n_bytes} byte" + "s" * (n_bytes != 1)


def static_bytes(
    estimate: Estimate, places: Sequence[int], device: int, training_factor: float
) -> int:
    """The parameters of a device's stages, and what training keeps of them."""
    stages = zip(estimate.stages, places, strict=True)
    held = sum(stage.parameter_bytes for stage, place in stages if place == device)
    return round(held * (1 + training_factor))
