"""Partition by OR-Tools CP-SAT: cuts with a proven lower bound on the simulated step.

The model, in whole units of time (each cost rounded down):

1. `late[j][a]`: atom a lies in stage j or a later one. Cuts rise, every stage has an atom.
2. A stage's forward and backward times, its memory, and the delay of the messages between it and
   the next are linear in these.
3. Every action of the schedule table starts after the one before it in its row, after its own
   forward, and after the messages from its neighbours; these keep the order of their link.
4. The makespan is minimised.

It is a relaxation of the simulator: of what crosses a boundary it counts only what is made in the
last atom before and read in the first atom after it, portals take no time, and a device's memory
counts parameters, gradients, buffers, saved bytes and those messages, each name at its first block.
Hence its bound holds for the simulated step of any cuts.
"""

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from fxpipe.passes import partition_dp
from fxpipe.passes.partition import Problem, Scorer, Solution
from fxpipe.passes.partition_atoms import BYTES_PER_UNIT, Atoms, atoms_of
from fxpipe.passes.partition_costs import Cuts, held_sets
from fxpipe.schedule import Action, Kind

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

# Rounding down loses less than this share of the step for each block and micro-batch.
_UNITS_PER_STEP = 10**7
# A gap below this is what rounding down may leave.
_ROUNDING = 1e-4
# OR-Tools counts 0.3 to 0.8 units of work in a second of one core; the rest is for a busy machine.
_WORK_PER_SECOND = 0.2


def solve(score: Scorer, *, seed: int, time_limit_s: float) -> Solution:
    """The best of the model's cuts and those of dynamic programming, with a bound.

    Where the simulator finds the model's optimum longer than the model did, or too large, these
    cuts are ruled out and the model is solved again, until its bound meets the best step found.

    One worker: several race, and which of two equal solutions comes first hangs on the machine's
    load. For the same reason the search is stopped by OR-Tools' own count of work; the limit in
    seconds only guards it.
    """
    from ortools.sat.python import cp_model

    problem = score.problem
    best = partition_dp.solve(score).cuts
    over, step_ms, _ = score(best)
    unit_ms = step_ms / _UNITS_PER_STEP or 1.0
    model = cp_model.CpModel()
    horizon = ceil(step_ms / unit_ms) if not over else 100 * _UNITS_PER_STEP
    late = _build(model, problem, atoms_of(problem, unit_ms), horizon)
    _give_hint(model, problem, late, best)
    bound_ms = _least_step_ms(problem)
    work, seconds = _WORK_PER_SECOND * time_limit_s, time_limit_s
    while work > 0 and seconds > 0:
        solver = cp_model.CpSolver()
        # Else OR-Tools puts its own handler, then the default one, in the place of Python's: from
        # then on Ctrl-C would kill the process.
        solver.parameters.catch_sigint_signal = False
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = work
        solver.parameters.max_time_in_seconds = seconds
        status = solver.solve(model)
        work -= solver.deterministic_time
        seconds -= solver.wall_time
        over, step_ms, _ = score(best)
        if status == cp_model.INFEASIBLE:
            # All cuts not ruled out are longer than the best, or fit no device.
            return Solution(best, None if over else step_ms)
        found_ms = max(0, int(solver.best_objective_bound)) * unit_ms * (1 - 1e-9)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            starts = [
                next(a for a, var in enumerate(row) if solver.value(var)) for row in late[1:-1]
            ]
            best = min(best, tuple(problem.edges[a] for a in starts), key=score)
            over, step_ms, _ = score(best)
            _rule_out(model, late, starts)
        # Cuts ruled out are no better than the best, so the bound holds for them too.
        bound_ms = max(bound_ms, found_ms if over else min(found_ms, step_ms))
        if status != cp_model.OPTIMAL or (not over and bound_ms >= step_ms * (1 - _ROUNDING)):
            break
    return Solution(best, bound_ms)


def _least_step_ms(problem: Problem) -> float:
    """A bound that needs no search, for models too large for one.

    Stage j's work w_j all lies between its first F and its last B, and what the stages before take
    for one micro-batch lies around it: step >= w_0 + ... + w_(j-1) + m w_j. These n inequalities,
    weighted so that each w_j counts the same, sum up to the chain's work over 1 - (1 - 1/m)^n.
    """
    m, n = problem.schedule.n_microbatches, problem.n_stages
    work_ms = sum(block.forward_ms + block.backward_ms for block in problem.chain.blocks)
    if problem.schedule.split:  # a W may lie after all that the stages before do
        return (1 - 1e-9) * work_ms * m / n
    return (1 - 1e-9) * work_ms / (1 - (1 - 1 / m) ** n)


def _build(
    model: "cp_model.CpModel", problem: Problem, atoms: Atoms, horizon: int
) -> "list[list[cp_model.IntVar]]":
    """Rules 1, 2 and 4; the variables `late`, with a row of ones before and of zeros after."""
    from ortools.sat.python import cp_model

    n, end = problem.n_stages, len(atoms.forward)
    dot = cp_model.LinearExpr.weighted_sum
    ones, zeros = model.new_constant(1), model.new_constant(0)
    late = [[ones] * end]
    for j in range(1, n):
        first, last = j, end - (n - j)
        row = [
            zeros if a < first else ones if a >= last else model.new_bool_var(f"late_{j}_{a}")
            for a in range(end)
        ]
        for a in range(1, end):
            model.add_implication(row[a - 1], row[a])
            model.add_implication(row[a], late[-1][a - 1])
        late.append(row)
    late.append([zeros] * end)

    def of_stage(costs: list[int], j: int) -> "cp_model.LinearExpr":
        return dot(late[j], costs) - dot(late[j + 1], costs)

    def at_start(costs: list[int], j: int) -> "cp_model.LinearExpr":
        return dot(late[j][1:], costs[1:]) - dot(late[j][:-1], costs[1:])

    def variable(value: "cp_model.LinearExpr", name: str) -> "cp_model.IntVar":
        result = model.new_int_var(0, horizon, name)
        model.add(result == value)
        return result

    for j, pairs in enumerate(held_sets(problem.schedule, problem.recompute)):
        for saved, in_flight in pairs:
            model.add(
                of_stage(atoms.static, j)
                + saved * of_stage(atoms.saved, j)
                + in_flight * at_start(atoms.received, j)
                + (in_flight - saved) * at_start(atoms.received_saved, j)
                <= problem.capacity_of(j) // BYTES_PER_UNIT
            )
    times = _Times(
        forward=[variable(of_stage(atoms.forward, j), f"forward_{j}") for j in range(n)],
        backward=[variable(of_stage(atoms.backward, j), f"backward_{j}") for j in range(n)],
        # Stage 0, whose gradient nobody waits for, leaves all of it for W.
        input=[zeros, *(variable(of_stage(atoms.input, j), f"input_{j}") for j in range(1, n))],
        weight=[
            variable(of_stage(atoms.weight if j else atoms.backward, j), f"weight_{j}")
            for j in range(n)
        ],
        send=[zeros, *(variable(at_start(atoms.send, j), f"send_{j}") for j in range(1, n))],
        back=[zeros, *(variable(at_start(atoms.back, j), f"back_{j}") for j in range(1, n))],
    )
    makespan = model.new_int_var(0, horizon, "makespan")
    _add_table(model, problem, times, makespan, horizon)
    model.minimize(makespan)
    return late


@dataclass(frozen=True, slots=True)
class _Times:
    """Variables by stage: `send` and `back` of the boundary before it."""

    forward: "list[cp_model.IntVar]"
    backward: "list[cp_model.IntVar]"
    input: "list[cp_model.IntVar]"
    weight: "list[cp_model.IntVar]"
    send: "list[cp_model.IntVar]"
    back: "list[cp_model.IntVar]"

    def of(self, action: Action) -> "cp_model.IntVar":
        """How long an action takes, without what it recomputes."""
        times = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT: self.input,
            Kind.WEIGHT: self.weight,
        }
        return times[action.kind][action.stage]


def _add_table(
    model: "cp_model.CpModel",
    problem: Problem,
    times: _Times,
    makespan: "cp_model.IntVar",
    horizon: int,
) -> None:
    """Rule 3, and for each stage: what comes before it, all its work, what comes after."""
    n, recompute = problem.n_stages, problem.recompute
    ends: dict[Action, cp_model.IntVar] = {}
    arrivals: dict[Action, cp_model.IntVar] = {}
    for row in problem.schedule.rows:
        for action in row:
            ends[action] = model.new_int_var(0, horizon, f"end_{action}")
            arrivals[action] = model.new_int_var(0, horizon, f"arrival_{action}")
    for row in problem.schedule.rows:
        before: Action | None = None
        sent: dict[bool, Action] = {}
        for action in row:
            j, i, kind = action.stage, action.microbatch, action.kind
            start = ends[action] - times.of(action)
            if kind.sends_back and recompute[j][i]:
                start = start - times.forward[j]
            model.add(start >= 0 if before is None else start >= ends[before])
            for needed in problem.schedule.needs(action):
                model.add(start >= (ends if needed.stage == j else arrivals)[needed])
            before = action
            if kind is not Kind.WEIGHT:
                forward = kind is Kind.FORWARD
                delay = times.back[j] if not forward else times.send[j + 1] if j + 1 < n else 0
                model.add(arrivals[action] >= ends[action] + delay)
                if forward in sent:
                    model.add(arrivals[action] >= arrivals[sent[forward]] + delay)
                sent[forward] = action
            model.add(makespan >= ends[action])
    m = problem.schedule.n_microbatches
    # A W may come after all that the stages before do.
    halved = bool(problem.schedule.split)
    rest = makespan - 0
    for j in range(n):
        rest = rest - times.send[j] - (0 if halved else times.back[j])
        model.add(rest >= (m + sum(recompute[j])) * times.forward[j] + m * times.backward[j])
        rest = rest - times.forward[j] - (0 if halved else times.backward[j])


def _give_hint(
    model: "cp_model.CpModel",
    problem: Problem,
    late: "list[list[cp_model.IntVar]]",
    cuts: Cuts,
) -> None:
    for j, cut in enumerate(cuts, start=1):
        for a in range(j, len(late[j]) - (problem.n_stages - j)):
            model.add_hint(late[j][a], problem.edges[a] >= cut)


def _rule_out(
    model: "cp_model.CpModel", late: "list[list[cp_model.IntVar]]", starts: list[int]
) -> None:
    """Not all stages may start at these atoms again."""
    model.add_bool_or(
        [late[j][a].negated() for j, a in enumerate(starts, start=1)]
        + [late[j][a - 1] for j, a in enumerate(starts, start=1)]
    )
