"""The named schedules beside a plan: what each would take on cuts of equal time."""

from collections.abc import Iterator
from functools import partial

from fxpipe.ir import Chain, CheckpointMode, Estimate, Network
from fxpipe.passes import checkpoints, order
from fxpipe.passes.order_whole import whole_where_it_pays
from fxpipe.passes.partition_costs import edges_of, evaluate
from fxpipe.passes.partition_path import even_path
from fxpipe.runtime.manifest import CandidateSpec
from fxpipe.schedule import Schedule


def named_candidates(
    chain: Chain,
    *,
    n_devices: int,
    n_microbatches: int,
    checkpoint: CheckpointMode,
    network: Network,
    capacity_bytes: tuple[int, ...],
    training_factor: float,
) -> Iterator[CandidateSpec]:
    """Each with as many stages a device as it usually has; those for which blocks suffice."""
    edges = edges_of(chain)
    for name in order.NAMES:
        loops = order.usual_loops(name, n_devices)
        n_stages = n_devices * loops
        if n_stages >= len(edges):
            continue
        cuts = tuple(edges[e] for e in even_path(chain, edges, n_stages)[1:-1])
        estimated = partial(
            evaluate,
            chain,
            cuts,
            checkpoint=checkpoints.place(checkpoint, n_stages),
            network=network,
            training_factor=training_factor,
        )
        table = order.build(name, n_devices, n_microbatches, loops)
        table = whole_where_it_pays(table, estimated, capacity_bytes)
        yield candidate(name, table, estimated(schedule=table), capacity_bytes)


def candidate(
    name: str, table: Schedule, estimate: Estimate, capacity_bytes: tuple[int, ...]
) -> CandidateSpec:
    """What `plan.json` keeps of it."""
    peaks = zip(estimate.peak_bytes, capacity_bytes, strict=True)
    return CandidateSpec(
        schedule=name,
        microbatches=table.n_microbatches,
        stages=table.n_stages,
        step_ms=estimate.step_ms,
        bubble=estimate.bubble,
        peak_bytes=max(estimate.peak_bytes),
        fits=all(peak <= capacity for peak, capacity in peaks),
    )
