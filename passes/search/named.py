"""The named schedules beside a plan: what each would take on cuts of equal time, or on its own."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from fxpipe.errors import PlanError
from fxpipe.ir import GIVEN, Chain, CheckpointMode, Estimate, Network, Plan
from fxpipe.passes import checkpoints, order
from fxpipe.passes.order_whole import whole_where_it_pays
from fxpipe.passes.partition import partition
from fxpipe.passes.partition_costs import edges_of, evaluate
from fxpipe.passes.partition_path import even_path
from fxpipe.passes.search.judge import SearchProblem
from fxpipe.passes.simulate_launches import Hosts
from fxpipe.runtime.manifest import CandidateSpec
from fxpipe.schedule import Schedule

# Those are given cuts of their own that on cuts of equal time take so much longer at most and need
# more than such a share of some device's memory; all are, where the plan beside them is as much
# longer than the bound. Of the shortest, tables of so many actions in all.
_NEAR, _SHORT, _MOST_ACTIONS = 0.1, 0.8, 1500


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
    for name, table, cuts, estimated in _on_equal_cuts(
        chain, n_devices, n_microbatches, checkpoint, network, training_factor, hosts
    ):
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


def shorter_named(problem: SearchProblem, than_ms: float, bound_ms: float) -> Plan | None:
    """The shortest that fits, with cuts by dynamic programming, if it is shorter than that.

    A search may come to none of them where memory is short, or its time. Where blocks may be
    computed again, so may whole stages: each mode of that is weighed.
    """
    shortest: Plan | None = None
    for mode in _modes(problem):
        plan = _shorter_in(problem, mode, than_ms, bound_ms)
        if plan is not None:
            shortest, than_ms = plan, plan.estimate.step_ms
    return shortest


def _modes(problem: SearchProblem) -> tuple[CheckpointMode, ...]:
    return tuple(CheckpointMode) if problem.recompute else (CheckpointMode.NEVER,)


def _shorter_in(
    problem: SearchProblem, mode: CheckpointMode, than_ms: float, bound_ms: float
) -> Plan | None:
    """The same in one mode."""
    p, m = problem.n_devices, problem.n_microbatches
    is_far = than_ms > bound_ms * (1 + _NEAR)
    near = []
    for name, table, _, estimated in _on_equal_cuts(
        problem.chain, p, m, mode, problem.network, problem.training_factor
    ):
        found = estimated(schedule=table)
        peaks = zip(found.peak_bytes, problem.capacity_bytes, strict=True)
        is_short = any(peak > _SHORT * capacity for peak, capacity in peaks)
        is_near = found.step_ms < than_ms * (1 + _NEAR)
        if (is_far or (is_short and is_near)) and table.n_stages // p in problem.loops:
            near.append((found.step_ms, name, table.n_stages, sum(map(len, table.rows))))
    shortest: Plan | None = None
    left = _MOST_ACTIONS
    for _, name, n_stages, n_actions in sorted(near):
        left -= n_actions
        if left < 0:
            break
        plan = _shorter(problem, name, n_stages, n_stages // p, mode, than_ms)
        if plan is not None:
            shortest, than_ms = plan, plan.estimate.step_ms
    return shortest


def shorter_by_modes(problem: SearchProblem, schedule_name: str, than_ms: float) -> Plan | None:
    """The same of the schedule of that name whose table is given, in each mode of recomputation."""
    table = problem.table
    assert table is not None
    schedule = table if schedule_name == GIVEN else schedule_name
    loops = max(Counter(table.stage_to_device).values())
    shortest: Plan | None = None
    for mode in _modes(problem):
        plan = _shorter(problem, schedule, table.n_stages, loops, mode, than_ms)
        if plan is not None:
            shortest, than_ms = plan, plan.estimate.step_ms
    return shortest


def _shorter(
    problem: SearchProblem,
    schedule: str | Schedule,
    n_stages: int,
    loops: int,
    checkpoint: CheckpointMode,
    than_ms: float,
) -> Plan | None:
    """The plan of a schedule, cut by dynamic programming, if it fits and is shorter than that."""
    if _least_ms(problem, checkpoint) >= than_ms:
        return None
    with suppress(PlanError):  # it does not fit
        plan = partition(
            problem.chain,
            n_stages=n_stages,
            n_microbatches=problem.n_microbatches,
            schedule=schedule,
            checkpoint=checkpoint,
            network=problem.network,
            capacity_bytes=problem.capacity_bytes,
            solver="dp",
            loops=loops,
            training_factor=problem.training_factor,
        )
        if plan.estimate.step_ms < than_ms:
            return plan
    return None


def _least_ms(problem: SearchProblem, checkpoint: CheckpointMode) -> float:
    """A device's share of a step's work, with what is computed again."""
    blocks, m = problem.chain.blocks, problem.n_microbatches
    n_again = sum(checkpoints.recomputes(checkpoint, i, m) for i in range(m))
    forward_ms = sum(block.forward_ms for block in blocks)
    backward_ms = sum(block.backward_ms for block in blocks)
    return ((m + n_again) * forward_ms + m * backward_ms) / problem.n_devices


def _on_equal_cuts(
    chain: Chain,
    n_devices: int,
    n_microbatches: int,
    checkpoint: CheckpointMode,
    network: Network,
    training_factor: float,
    hosts: Hosts | None = None,
) -> Iterator[tuple[str, Schedule, tuple[int, ...], Callable[..., Estimate]]]:
    """Each schedule's name, table and cuts, and what estimates a step of its stages."""
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
            hosts=hosts,
        )
        yield name, order.build(name, n_devices, n_microbatches, loops), cuts, estimated


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
