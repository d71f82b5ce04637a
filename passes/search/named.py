"""The named schedules beside a plan: what each would take on cuts of equal time."""

from collections.abc import Callable, Iterator
from functools import partial

from fxpipe.ir import Chain, CheckpointMode, Estimate, Network, Plan
from fxpipe.passes import checkpoints, order
from fxpipe.passes.order_whole import whole_where_it_pays
from fxpipe.passes.partition_costs import edges_of, evaluate
from fxpipe.passes.partition_path import even_path
from fxpipe.passes.simulate_launches import Hosts
from fxpipe.runtime.manifest import CandidateSpec
from fxpipe.schedule import Schedule


def named_plans(
    chain: Chain,
    *,
    n_devices: int,
    n_microbatches: int,
    checkpoint: CheckpointMode,
    network: Network,
    capacity_bytes: tuple[int, ...],
    training_factor: float,
    hosts: Hosts | None = None,
) -> Iterator[Plan]:
    """On cuts of equal time, whether they fit or not; those for which blocks suffice.

    Each has as many stages a device as it usually has.
    """
    for name, table in named_tables(chain, n_devices, n_microbatches):
        cuts, estimated = on_equal_cuts(
            chain, table.n_stages, checkpoint, network, training_factor, hosts
        )
        own = whole_where_it_pays(table, estimated, capacity_bytes)
        yield Plan(
            cuts=cuts,
            stage_to_device=own.stage_to_device,
            schedule_name=name,
            schedule=own,
            checkpoint=checkpoints.place(checkpoint, own.n_stages),
            estimate=estimated(schedule=own),
            solver="equal cuts",
        )


def named_tables(
    chain: Chain, n_devices: int, n_microbatches: int
) -> Iterator[tuple[str, Schedule]]:
    """Those for which blocks suffice, with as many stages a device as each usually has."""
    most = len(edges_of(chain)) - 1
    for name in order.NAMES:
        loops = order.usual_loops(name, n_devices)
        if n_devices * loops <= most:
            yield name, order.build(name, n_devices, n_microbatches, loops)


def on_equal_cuts(
    chain: Chain,
    n_stages: int,
    checkpoint: CheckpointMode,
    network: Network,
    training_factor: float,
    hosts: Hosts | None = None,
) -> tuple[tuple[int, ...], Callable[..., Estimate]]:
    """Cuts into so many stages, and what estimates their step under a `schedule`."""
    edges = edges_of(chain)
    cuts = tuple(edges[e] for e in even_path(chain, edges, n_stages)[1:-1])
    return cuts, partial(
        evaluate,
        chain,
        cuts,
        checkpoint=checkpoints.place(checkpoint, n_stages),
        network=network,
        training_factor=training_factor,
        hosts=hosts,
    )


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
