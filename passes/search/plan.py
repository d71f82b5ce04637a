"""From what the search found to a plan: its table, its segments, its estimate, its bound."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf

from fxpipe.errors import PlanError
from fxpipe.ir import GIVEN, Chain, CheckpointMode, Network, Plan
from fxpipe.passes import checkpoints
from fxpipe.passes.order_whole import all_whole, whole_where_it_pays
from fxpipe.passes.partition_costs import (
    edges_of,
    evaluate,
    segmented_costs,
    size_text,
    static_bytes,
    too_few_blocks,
)
from fxpipe.passes.search import ordered
from fxpipe.passes.search.again_kernel import FIRST, MORE
from fxpipe.passes.search.climbs import Search
from fxpipe.passes.search.judge import Found, Judge, SearchProblem
from fxpipe.passes.search.lean import lean_search
from fxpipe.passes.search.tables import table_of
from fxpipe.passes.search.weighed import nearest_named, shorter_by_modes, shorter_named
from fxpipe.passes.simulate import simulate
from fxpipe.schedule import Schedule

NAME = "auto"
NAMES = (NAME, ordered.NAME)  # of schedules whose order is left open
# Numbers of stages a device, of which each is a file that people read; and those of a bare chain.
LOOPS = (1, 2, 3, 4, 6)
_MORE_LOOPS, _MOST_STAGES = 16, 64
TIME_LIMIT_S = 30.0
# Named schedules whose cuts and segments are sought besides, and for how long each.
_NAMED, _NAMED_S = 3, 0.5


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
    schedule_name: str = NAME,
    seed: int = 0,
    time_limit_s: float = TIME_LIMIT_S,
    n_workers: int | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> Plan:
    """Cuts, stages a device, map, order and recomputation with a short simulated step that fits.

    With `recompute`, blocks are computed again where that pays. `loops` are the numbers of stages a
    device that are tried; with a `table`, of the schedule of that name, its order stands. Of the
    schedule cpsat, half of the time goes to CP-SAT's search for the order of the stages found.
    `progress` is told each better step in ms. The same `seed`, `time_limit_s` and `n_workers` (by
    default a thread for each core, four at most) give the same plan on a machine that is fast
    enough to do the work of that time. Raises PlanError where nothing that was found fits.
    """
    orders = schedule_name == ordered.NAME
    if orders:
        loops = ordered.few_enough(loops, n_devices, n_microbatches)
    problem = SearchProblem(
        chain=chain,
        edges=edges_of(chain),
        n_devices=n_devices,
        n_microbatches=n_microbatches,
        network=network,
        capacity_bytes=capacity_bytes,
        training_factor=training_factor,
        recompute=recompute,
        loops=loops,
    )
    if table is not None:
        problem = _ordered(problem, table, schedule_name)
    _check(problem)
    n_workers = n_workers or usual_workers()
    run, found = lean_search(
        problem,
        seed=seed,
        time_limit_s=time_limit_s / 2 if orders else time_limit_s,
        n_workers=n_workers,
        progress=progress,
    )
    plan = _plan(problem, run.judge, found, schedule_name, run.bound_ms)
    than_ms = plan.estimate.step_ms if lacking(problem, plan) <= 0 else inf
    if table is None:
        other = shorter_named(problem, than_ms, run.bound_ms)
    else:
        other = shorter_by_modes(problem, schedule_name, than_ms)
    if other is not None:
        plan = replace(other, schedule_name=schedule_name, bound_ms=run.bound_ms)
    if table is None and recompute and lacking(problem, plan) <= 0:
        plan = _as_named(problem, plan, seed, n_workers)
    if lacking(problem, plan) > 0:
        raise PlanError(_does_not_fit(problem, plan))
    if not orders:
        return plan
    return ordered.in_best_order(
        chain,
        plan,
        network=network,
        capacity_bytes=capacity_bytes,
        training_factor=training_factor,
        seed=seed,
        time_limit_s=time_limit_s / 2,
        n_workers=n_workers,
    )


def _ordered(problem: SearchProblem, table: Schedule, schedule_name: str) -> SearchProblem:
    """The same for the schedule of that name whose table is given."""
    whole = all_whole(table) if table.split and schedule_name != GIVEN else None
    return replace(problem, table=table, whole=whole)


def _as_named(problem: SearchProblem, plan: Plan, seed: int, n_workers: int) -> Plan:
    """The shortest of it and some named schedules, whose cuts and segments are sought for a bit."""
    for table in nearest_named(problem, plan.estimate.step_ms)[:_NAMED]:
        of_table = _ordered(problem, table, NAME)
        run = Search(of_table, seed=seed, time_limit_s=_NAMED_S, n_workers=n_workers)
        other = _plan(of_table, run.judge, run.run(), plan.schedule_name, inf)
        if lacking(problem, other) <= 0 and other.estimate.step_ms < plan.estimate.step_ms:
            plan = replace(other, bound_ms=plan.bound_ms)
    return plan


def chain_loops(n_devices: int) -> tuple[int, ...]:
    """Numbers of stages a device to try with a bare chain: small stages are begun soon."""
    most = min(_MORE_LOOPS, _MOST_STAGES // n_devices)
    return tuple(sorted({*LOOPS, *range(1, most + 1)}))


def usual_workers() -> int:
    """Threads of a search where nothing is said."""
    return min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


def _check(problem: SearchProblem) -> None:
    n_atoms = len(problem.edges) - 1
    if problem.n_microbatches < 1:
        raise PlanError(f"{problem.n_microbatches} micro-batches: a step needs at least 1")
    if problem.least_stages > n_atoms:
        raise PlanError(too_few_blocks(problem.least_stages, n_atoms))


def _plan(
    problem: SearchProblem, judge: Judge, found: Found, schedule_name: str, bound_ms: float
) -> Plan:
    bounds = tuple(problem.edges[e] for e in found.candidate.path)
    _, again = judge.numbers(found.candidate)
    segments = tuple(segments_of(again.tolist(), begin, end) for begin, end in pairwise(bounds))
    checkpoint = checkpoints.place(CheckpointMode.NEVER, len(segments))

    table = found.candidate.table or table_of(found, problem.n_devices)
    if schedule_name != GIVEN:
        stages, messages = segmented_costs(
            problem.chain, bounds[1:-1], problem.training_factor, segments
        )
        step = partial(
            simulate,
            stages=stages,
            messages=messages,
            network=problem.network,
            recompute=checkpoints.recompute_table(checkpoint, problem.n_microbatches),
            record=False,
        )
        table = whole_where_it_pays(table, step, problem.capacity_bytes)
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
        schedule_name=schedule_name,
        schedule=table,
        checkpoint=checkpoint,
        estimate=estimate,
        solver="search",
        bound_ms=bound_ms,
        segments=segments if any(segments) else (),
    )


def lacking(problem: SearchProblem, plan: Plan) -> int:
    """How many bytes the device lacks that lacks most; negative if all have some to spare."""
    peaks = zip(plan.estimate.peak_bytes, problem.capacity_bytes, strict=True)
    return max(peak - capacity for peak, capacity in peaks)


def segments_of(marks: list[int], begin: int, end: int) -> tuple[tuple[int, int], ...]:
    """The segments within [begin, end) that blocks are marked as."""
    starts = [k for k in range(begin, end) if marks[k] == FIRST]
    ends = [next((k for k in range(start + 1, end) if marks[k] != MORE), end) for start in starts]
    return tuple(zip(starts, ends, strict=True))


def _does_not_fit(problem: SearchProblem, plan: Plan) -> str:
    """What the nearest plan lacks, where and when, and what was found to make one fit."""
    peaks = plan.estimate.peak_bytes
    held = problem.chain.library_bytes
    over = [peak - room for peak, room in zip(peaks, problem.capacity_bytes, strict=True)]
    d = over.index(max(over))
    at_ms = next(ms for ms, size in plan.estimate.memory[d] if size == peaks[d])
    spans = zip(plan.schedule.rows[d], plan.estimate.spans[d], strict=True)
    action = next((a for a, (start, end) in spans if start <= at_ms <= end), "a message's arrival")
    static = static_bytes(plan.estimate, plan.stage_to_device, d, problem.training_factor)
    smaller = ["smaller micro-batches"] if static < problem.capacity_bytes[d] else []
    ways = [*_remedies(problem, plan.schedule_name), *smaller] or ["devices with more memory"]
    return (
        f"no plan fits: in the nearest one found, device {d} needs {size_text(peaks[d] + held)} at "
        f"{action} and has {size_text(problem.capacity_bytes[d] + held)}, {size_text(over[d])} "
        f"less. What would make it fit: {', or '.join(ways)}"
    )


def _remedies(problem: SearchProblem, schedule_name: str) -> Iterator[str]:
    """What was tried and makes some plan fit, before the search moves anything."""
    again = replace(problem, recompute=True)
    fits = partial(_fits, schedule_name=schedule_name)
    if not problem.recompute and fits(again):
        yield "`--checkpoint auto`"
        return
    if problem.table is not None and fits(replace(again, table=None, whole=None)):
        yield "`--schedule auto`, with `--checkpoint auto`"
        return
    if problem.training_factor > 1 and fits(replace(again, training_factor=1.0)):
        bare = not problem.chain.divides  # what it keeps of parameters is said with its costs
        how = "`optimizer_bytes_per_parameter_byte` 1" if bare else "`--optimizer sgd`"
        yield f"an optimizer without states ({how})"
    p, smallest = problem.n_devices, min(problem.capacity_bytes)
    for n_devices in (p + p // 2 + p % 2, 2 * p, 4 * p):
        more = replace(again, n_devices=n_devices, capacity_bytes=(smallest,) * n_devices)
        if problem.table is None and more.least_stages < len(problem.edges) and fits(more):
            capacity = smallest + problem.chain.library_bytes
            yield f"{n_devices} devices of {size_text(capacity)}, with `--checkpoint auto`"
            return


def _fits(problem: SearchProblem, schedule_name: str) -> bool:
    if Search(problem, seed=0, time_limit_s=0.0).run().worth[0] == 0:
        return True
    return problem.table is not None and bool(shorter_by_modes(problem, schedule_name, inf))
