"""From what the search found to a plan: its table, its segments, its estimate, its bound."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from fxpipe.errors import PlanError
from fxpipe.ir import Chain, CheckpointMode, Network, Plan
from fxpipe.passes import checkpoints
from fxpipe.passes.partition_costs import evaluate
from fxpipe.passes.search import Search, table_of
from fxpipe.passes.search_bound import lower_bound_ms
from fxpipe.passes.search_judge import Found, Judge, SearchProblem
from fxpipe.schedule import Action, Kind, Schedule

NAME = "auto"
LOOPS = (1, 2, 3, 4)
TIME_LIMIT_S = 30.0


def search(
    chain: Chain,
    *,
    n_devices: int,
    n_microbatches: int,
    network: Network,
    capacity_bytes: tuple[int, ...],
    training_factor: float = 1.0,
    recompute: bool = False,
    loops: tuple[int, ...] = LOOPS,
    table: Schedule | None = None,
    seed: int = 0,
    time_limit_s: float = TIME_LIMIT_S,
    progress: Callable[[float], None] = lambda _: None,
) -> Plan:
    """Cuts, stages a device, map, order and recomputation with a short simulated step that fits.

    With `recompute`, blocks are computed again where that pays. `loops` are the numbers of stages a
    device that are tried; with a `table` its order stands. `progress` is told each better step in
    ms. The same `seed` and `time_limit_s` give the same plan on a machine that is fast enough to do
    the work of that time. Raises PlanError where nothing that was found fits.
    """
    edges = (0, *(k + 1 for k in range(len(chain.blocks) - 1) if chain.cuttable[k]))
    problem = SearchProblem(
        chain=chain,
        edges=(*edges, len(chain.blocks)),
        n_devices=n_devices,
        n_microbatches=n_microbatches,
        network=network,
        capacity_bytes=capacity_bytes,
        training_factor=training_factor,
        recompute=recompute,
        loops=loops,
        table=table,
    )
    _check(problem)
    run = Search(problem, seed=seed, time_limit_s=time_limit_s, progress=progress)
    plan = _plan(problem, run.judge, run.run())
    lacking = [p - c for p, c in zip(plan.estimate.peak_bytes, capacity_bytes, strict=True)]
    if max(lacking) > 0:
        raise PlanError(_does_not_fit(problem, plan, lacking))
    return plan


def _check(problem: SearchProblem) -> None:
    least = problem.n_devices if problem.table is None else problem.table.n_stages
    n_atoms = len(problem.edges) - 1
    if problem.n_microbatches < 1:
        raise PlanError(f"{problem.n_microbatches} micro-batches: a step needs at least 1")
    if least > n_atoms:
        raise PlanError(
            f"{least} stages, but the model has only {n_atoms} "
            f"{'block' if n_atoms == 1 else 'blocks'} that can be cut apart: use at most {n_atoms}"
        )


def _plan(problem: SearchProblem, judge: Judge, found: Found) -> Plan:
    bounds = tuple(problem.edges[e] for e in found.candidate.path)
    _, again = judge.numbers(found.candidate, found.split)
    segments = tuple(runs(again.tolist(), begin, end) for begin, end in pairwise(bounds))
    schedule = problem.table or table_of(found, problem.n_devices)
    checkpoint = checkpoints.place(CheckpointMode.NEVER, len(segments))

    def plan(table: Schedule) -> Plan:
        estimate = evaluate(
            problem.chain,
            bounds[1:-1],
            schedule=table,
            checkpoint=checkpoint,
            network=problem.network,
            training_factor=problem.training_factor,
            segments=segments,
        )
        return Plan(
            cuts=bounds[1:-1],
            stage_to_device=table.stage_to_device,
            schedule_name=NAME,
            schedule=table,
            checkpoint=checkpoint,
            estimate=estimate,
            solver="search",
            bound_ms=lower_bound_ms(
                problem.chain,
                problem.edges,
                problem.n_devices,
                problem.n_microbatches,
                problem.network,
            ),
            segments=segments if any(segments) else (),
        )

    best = plan(schedule)
    if problem.table is not None:
        return best
    for stages in (range(len(segments)), *((j,) for j in range(len(segments)))):
        merged = whole(best.schedule, stages)
        if merged != best.schedule:
            found_plan = plan(merged)
            shorter = found_plan.estimate.step_ms <= best.estimate.step_ms * (1 + 1e-9)
            peaks = zip(
                found_plan.estimate.peak_bytes,
                best.estimate.peak_bytes,
                problem.capacity_bytes,
                strict=True,
            )
            if shorter and all(new <= max(old, room) for new, old, room in peaks):
                best = found_plan
    return best


def whole(schedule: Schedule, stages: Sequence[int]) -> Schedule:
    """The table with I and W of these stages as one B where W comes right after I."""
    rows = []
    for row in schedule.rows:
        made: list[Action] = []
        for action in row:
            last = made[-1] if made else None
            if (
                action.kind is Kind.WEIGHT
                and action.stage in stages
                and last == replace(action, kind=Kind.INPUT)
            ):
                made[-1] = replace(action, kind=Kind.BACKWARD)
            else:
                made.append(action)
        rows.append(tuple(made))
    return Schedule(tuple(rows))


def runs(marked: list[bool], begin: int, end: int) -> tuple[tuple[int, int], ...]:
    """The runs of marked blocks within [begin, end)."""
    starts = [k for k in range(begin, end) if marked[k] and (k == begin or not marked[k - 1])]
    ends = [k + 1 for k in range(begin, end) if marked[k] and (k + 1 == end or not marked[k + 1])]
    return tuple(zip(starts, ends, strict=True))


def _does_not_fit(problem: SearchProblem, plan: Plan, lacking: list[int]) -> str:
    return f"{lacking}"
