"""Named schedules, and modes of recomputation, that are weighed against what a search found.

A search may come to none of them where memory is short, or its time.
"""

from collections import Counter
from contextlib import suppress
from math import inf

from fxpipe.errors import PlanError
from fxpipe.ir import GIVEN, CheckpointMode, Estimate, Plan
from fxpipe.passes import checkpoints
from fxpipe.passes.partition import partition
from fxpipe.passes.search.judge import SearchProblem
from fxpipe.passes.search.named import named_tables, on_equal_cuts
from fxpipe.schedule import Schedule

# Beside a plan, those are given cuts of their own that on cuts of equal time take so much longer at
# most (their own were up to 15 % shorter) and hold no more in all than so many times what there is.
_NEAR, _MOST_HELD = 0.2, 1.5
# And need more than such a share of some device's memory, or the plan is so much longer than the
# bound: else the search did well. Of the shortest, tables of so many actions in all.
_SHORT, _FAR, _MOST_ACTIONS = 0.8, 0.1, 1500
# Of how many blocks times stages cuts come soon: of more they take many seconds. And of how many a
# search for half a second finds cuts and segments: of more it was never shorter than a plan.
_SOON, _AT_ONCE = 20_000, 1000


def shorter_named(problem: SearchProblem, than_ms: float, bound_ms: float) -> Plan | None:
    """The shortest that fits, with cuts by dynamic programming, if it is shorter than that.

    Where blocks may be computed again, so may whole stages: each mode of that is weighed.
    """
    shortest: Plan | None = None
    for mode in _modes(problem):
        plan = _shorter_in(problem, mode, than_ms, bound_ms)
        if plan is not None:
            shortest, than_ms = plan, plan.estimate.step_ms
    return shortest


def nearest_named(problem: SearchProblem, than_ms: float) -> list[Schedule]:
    """Tables of named schedules that a short search may make shorter, the nearest first.

    These are of few stages and blocks, and near it on cuts of equal time if nothing is computed
    again: of parts of stages little may have to be.
    """
    near = []
    for name, table in named_tables(problem.chain, problem.n_devices, problem.n_microbatches):
        few = len(problem.chain.blocks) * table.n_stages <= _AT_ONCE
        if not few or table.n_stages // problem.n_devices not in problem.loops:
            continue
        step_ms = _on_equal_cuts(problem, table, CheckpointMode.NEVER).step_ms
        if step_ms < than_ms * (1 + _NEAR):
            near.append((step_ms, name, table))
    return [table for *_, table in sorted(near, key=lambda one: one[:2])]


def _shorter_in(
    problem: SearchProblem, mode: CheckpointMode, than_ms: float, bound_ms: float
) -> Plan | None:
    """The same in one mode."""
    p, m = problem.n_devices, problem.n_microbatches
    is_far = than_ms > bound_ms * (1 + _FAR)
    near = []
    for name, table in named_tables(problem.chain, p, m):
        if table.n_stages // p not in problem.loops:
            continue
        found = _on_equal_cuts(problem, table, mode)
        peaks = zip(found.peak_bytes, problem.capacity_bytes, strict=True)
        is_short = any(peak > _SHORT * capacity for peak, capacity in peaks)
        if (is_far or is_short) and _may_be_shorter(problem, found, than_ms):
            near.append((found.step_ms, name, table))
    shortest: Plan | None = None
    left = _MOST_ACTIONS
    for _, name, table in sorted(near, key=lambda one: one[:2]):
        left -= sum(map(len, table.rows))
        if left < 0:
            break
        plan = _shorter(problem, name, table, mode, than_ms)
        if plan is not None:
            shortest, than_ms = plan, plan.estimate.step_ms
    return shortest


def _may_be_shorter(problem: SearchProblem, found: Estimate, than_ms: float) -> bool:
    """Whether other cuts than these of equal time may fit and be shorter than that."""
    if than_ms == inf:
        return True
    may_fit = sum(found.peak_bytes) < _MOST_HELD * sum(problem.capacity_bytes)
    return may_fit and found.step_ms < than_ms * (1 + _NEAR)


def shorter_by_modes(problem: SearchProblem, schedule_name: str, than_ms: float) -> Plan | None:
    """The same of the schedule of that name whose table is given, in each mode of recomputation.

    If there is a plan, only where cuts come soon.
    """
    table = problem.table
    assert table is not None
    schedule = table if schedule_name == GIVEN else schedule_name
    shortest: Plan | None = None
    if than_ms < inf and len(problem.chain.blocks) * table.n_stages > _SOON:
        return None
    for mode in _modes(problem):
        plan = _shorter(problem, schedule, table, mode, than_ms)
        if plan is not None:
            shortest, than_ms = plan, plan.estimate.step_ms
    return shortest


def _modes(problem: SearchProblem) -> tuple[CheckpointMode, ...]:
    return tuple(CheckpointMode) if problem.recompute else (CheckpointMode.NEVER,)


def _on_equal_cuts(problem: SearchProblem, table: Schedule, mode: CheckpointMode) -> Estimate:
    _, estimated = on_equal_cuts(
        problem.chain, table.n_stages, mode, problem.network, problem.training_factor
    )
    return estimated(schedule=table)


def _shorter(
    problem: SearchProblem,
    schedule: str | Schedule,
    table: Schedule,
    checkpoint: CheckpointMode,
    than_ms: float,
) -> Plan | None:
    """The plan of a schedule, cut by dynamic programming, if it fits and is shorter than that."""
    if _least_ms(problem, checkpoint) >= than_ms:
        return None
    with suppress(PlanError):  # it does not fit
        plan = partition(
            problem.chain,
            n_stages=table.n_stages,
            n_microbatches=problem.n_microbatches,
            schedule=schedule,
            checkpoint=checkpoint,
            network=problem.network,
            capacity_bytes=problem.capacity_bytes,
            solver="dp",
            loops=max(Counter(table.stage_to_device).values()),
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
