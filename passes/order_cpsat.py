"""The order of actions by OR-Tools CP-SAT: the shortest step of given stages, with a lower bound.

The bound holds for each order of the same stages on the same devices: the model is a relaxation of
the simulator (order_model.py). The answer is judged by the simulator, as all others are.
"""

from dataclasses import dataclass
from math import ceil

from fxpipe.passes.order_model import OrderModel
from fxpipe.passes.order_problem import OrderProblem
from fxpipe.passes.order_whole import whole_where_it_pays
from fxpipe.schedule import Schedule

# Rounding down loses less than this share of the step for each action on the critical path. With
# ten times as many, small problems take several times as long.
_UNITS_PER_STEP = 10**4
# OR-Tools counts 0.3 to 0.8 units of work in a second of one core; the rest is for a busy machine.
_WORK_PER_SECOND = 0.2
# How often an order is sought again that the simulator finds too large.
_TRIES = 4


def solve(
    problem: OrderProblem, *, hint: Schedule, seed: int, time_limit_s: float, n_workers: int = 1
) -> tuple[Schedule, float]:
    """The best order found, `hint` or a better one, and a lower bound in ms on the step of any.

    Half of the time goes to a search that starts each action as early as it can, and is told of no
    hint; the rest to OR-Tools' own, from the best so far. Where the simulator finds the model's
    order too large, because messages don't wait for room there, it is solved again with as much
    less room. With the same `seed` and `n_workers` the answer is the same: the search is stopped by
    OR-Tools' own count of work, and the limit in seconds only guards it.
    """
    best, bound_ms = hint, problem.least_step_ms()
    spare = (0,) * len(problem.capacity_bytes)
    left = _Left(_WORK_PER_SECOND * time_limit_s, time_limit_s)
    for greedy in (True, False) * _TRIES:
        over, step_ms = problem.rank(best)
        if (not over and bound_ms >= step_ms * (1 - 1e-9)) or min(left.work, left.seconds) <= 0:
            break
        unit_ms = _unit_ms(problem, step_ms)
        # An order that fits may take longer than one that doesn't.
        model = OrderModel(problem, spare, unit_ms, ceil(step_ms / unit_ms) * (20 if over else 1))
        if greedy:
            model.go_greedily()
        else:
            model.hint(best)
        # OR-Tools 9.15 aborts where several workers are given a hint and nothing is feasible, as
        # with less room may be (github.com/google/or-tools/issues/5025).
        found, least = _search(model, left, greedy, seed, 1 if any(spare) else n_workers)
        if not any(spare):
            bound_ms = max(bound_ms, least * unit_ms * (1 - 1e-9))
        if found is not None:
            best = min(best, found, key=problem.rank)
            lacking = problem.over(found)
            if not greedy and any(lacking):
                spare = tuple(a + b for a, b in zip(spare, lacking, strict=True))
                continue
        if not greedy:
            break
    best = whole_where_it_pays(best, problem.simulate, problem.capacity_bytes)
    over, step_ms = problem.rank(best)
    return best, bound_ms if over else min(bound_ms, step_ms)


@dataclass(slots=True)
class _Left:
    """What is left of the limit: OR-Tools' units of work, and seconds."""

    work: float
    seconds: float


def _search(
    model: OrderModel, left: _Left, greedy: bool, seed: int, n_workers: int
) -> tuple[Schedule | None, float]:
    """An order, if one was found, and the least that any takes, in units of time."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    # Else OR-Tools puts its own handler, then the default one, in the place of Python's: from then
    # on Ctrl-C would kill the process.
    solver.parameters.catch_sigint_signal = False
    if greedy:
        solver.parameters.search_branching = cp_model.FIXED_SEARCH
    solver.parameters.num_workers = 1 if greedy else n_workers
    solver.parameters.interleave_search = n_workers > 1 and not greedy
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = left.work / (2 if greedy else 1)
    solver.parameters.max_time_in_seconds = left.seconds / (2 if greedy else 1)
    status = solver.solve(model.model)
    left.work -= solver.deterministic_time
    left.seconds -= solver.wall_time
    if status == cp_model.INFEASIBLE:  # says nothing of what is longer than the horizon
        return None, 0.0
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return model.order(solver) if found else None, solver.best_objective_bound


def _unit_ms(problem: OrderProblem, step_ms: float) -> float:
    """A part of the shortest action, so that nothing is rounded where all take equally long."""
    each = (action for j in range(len(problem.stages)) for action in problem.actions(j, 0))
    shortest = min((ms for action in each if (ms := problem.action_ms(action))), default=1.0)
    return shortest / ceil(shortest * _UNITS_PER_STEP / step_ms) if step_ms else 1.0
