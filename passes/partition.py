"""Partition: where to cut the chain. What the solvers share, and the entry that picks one.

Solvers look for cuts in their own ways, but all are judged by `Scorer`, which asks the simulator,
so that a plan's estimate is always the simulator's word.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from fxpipe.errors import PlanError
from fxpipe.ir import GIVEN, Chain, CheckpointMode, Estimate, Network, Plan
from fxpipe.passes import checkpoints, order
from fxpipe.passes.order_whole import whole_where_it_pays
from fxpipe.passes.partition_blocks import held_at_rest
from fxpipe.passes.partition_costs import (
    Cuts,
    edges_of,
    evaluate,
    size_text,
    static_bytes,
    too_few_blocks,
)
from fxpipe.passes.partition_stages import StageCosts
from fxpipe.passes.simulate import Simulation, simulate
from fxpipe.schedule import Schedule

SOLVERS = ("dp", "beam", "cpsat")


@dataclass(frozen=True, slots=True)
class Problem:
    """What a solver is given. `edges` are 0, each place where a stage may begin, and the end.

    The blocks between two neighbouring edges are an *atom*: no plan takes them apart. A device
    holds a stage of each of the `loops`.
    """

    chain: Chain
    n_stages: int
    schedule: Schedule
    checkpoint: tuple[CheckpointMode, ...]
    network: Network
    capacity_bytes: tuple[int, ...]
    edges: tuple[int, ...]
    loops: int = 1
    training_factor: float = 1.0

    @property
    def n_devices(self) -> int:
        """Rows of the table."""
        return len(self.schedule.rows)

    def capacity_of(self, stage: int) -> int:
        """What the device of `stage` holds."""
        return self.capacity_bytes[self.schedule.stage_to_device[stage]]

    @property
    def recompute(self) -> tuple[tuple[bool, ...], ...]:
        """For each stage, for each micro-batch: is it recomputed?"""
        return checkpoints.recompute_table(self.checkpoint, self.schedule.n_microbatches)


@dataclass(frozen=True, slots=True)
class Solution:
    """A solver's answer, and a proven lower bound on the step of any cuts, if it has one."""

    cuts: Cuts
    bound_ms: float | None = None


class Scorer:
    """Judges cuts by the simulator, each once: first by bytes over capacity, then by step."""

    def __init__(self, problem: Problem, costs: StageCosts) -> None:
        """`costs` are those of the problem's chain."""
        self.problem = problem
        self.judged: dict[Cuts, tuple[int, float]] = {}
        self._costs = costs
        self._recompute = problem.recompute

    def under(self, cuts: Cuts, schedule: Schedule) -> Simulation:
        """A step of these cuts under an order of their stages' actions."""
        stages, messages = self._costs(cuts)
        network = self.problem.network
        return simulate(schedule, stages, messages, network, self._recompute, record=False)

    def __call__(self, cuts: Cuts) -> tuple[int, float, Cuts]:
        """What to sort cuts by, best first."""
        if cuts not in self.judged:
            found = self.under(cuts, self.problem.schedule)
            peaks = zip(found.peak_bytes, self.problem.capacity_bytes, strict=True)
            over = sum(max(0, peak - capacity) for peak, capacity in peaks)
            self.judged[cuts] = over, found.step_ms
        # The cuts themselves break ties, so that no result hangs on the order of the search.
        return *self.judged[cuts], cuts


def partition(
    chain: Chain,
    *,
    n_stages: int,
    n_microbatches: int,
    schedule: str | Schedule,
    checkpoint: CheckpointMode,
    network: Network,
    capacity_bytes: tuple[int, ...],
    solver: str,
    loops: int = 1,
    training_factor: float = 1.0,
    seed: int = 0,
    time_limit_s: float = 10.0,
) -> Plan:
    """Cut `chain` into `n_stages` so that the simulated step is short and fits each device.

    Each device holds `loops` of the stages, as `schedule` deals them out: the name of one, or a
    table that can run. It has room for its `capacity_bytes`: `training_factor` bytes of gradients
    and optimizer states for each byte of parameters, and what the simulator counts besides.
    `solver` is one of `SOLVERS`; `seed` and `time_limit_s` are for those that use chance or time.
    Raises PlanError where no such cut exists, ScheduleError for an unknown schedule.
    """
    from fxpipe.passes.partition_tidy import tidy  # it imports this module, as the solvers do

    edges = edges_of(chain)
    _check_counts(n_stages, n_microbatches, len(edges) - 1, solver)
    problem = Problem(
        chain=chain,
        n_stages=n_stages,
        schedule=schedule
        if isinstance(schedule, Schedule)
        else order.build(schedule, n_stages // loops, n_microbatches, loops),
        checkpoint=checkpoints.place(checkpoint, n_stages),
        network=network,
        capacity_bytes=capacity_bytes,
        edges=edges,
        loops=loops,
        training_factor=training_factor,
    )
    costs = StageCosts(chain, training_factor)
    score = Scorer(problem, costs)
    solution = _solve(solver, score, seed, time_limit_s)
    found = solution.cuts
    if isinstance(schedule, str) and problem.schedule.split:
        # With backwards whole where that pays, other cuts may be better.
        under = partial(score.under, found)
        table = whole_where_it_pays(problem.schedule, under, capacity_bytes)
        problem = replace(problem, schedule=table)
        score = Scorer(problem, costs)
        solution = _solve(solver, score, seed, time_limit_s)
        found = min(found, solution.cuts, key=score)
    cuts = tidy(score, found)
    estimate = evaluate(
        chain,
        cuts,
        schedule=problem.schedule,
        checkpoint=problem.checkpoint,
        network=network,
        training_factor=training_factor,
    )
    if score(cuts)[0] > 0:
        raise PlanError(_does_not_fit(problem, estimate, checkpoint))
    return Plan(
        cuts=cuts,
        stage_to_device=problem.schedule.stage_to_device,
        schedule_name=schedule if isinstance(schedule, str) else GIVEN,
        schedule=problem.schedule,
        checkpoint=problem.checkpoint,
        estimate=estimate,
        solver=solver,
        bound_ms=solution.bound_ms,
    )


def _solve(solver: str, score: Scorer, seed: int, time_limit_s: float) -> Solution:
    # The solvers import this module, and OR-Tools takes longer to import than to skip.
    if solver == "dp":
        from fxpipe.passes import partition_dp

        return partition_dp.solve(score)
    if solver == "beam":
        from fxpipe.passes import partition_beam

        return partition_beam.solve(score, seed=seed)
    from fxpipe.passes import partition_cpsat

    return partition_cpsat.solve(score, seed=seed, time_limit_s=time_limit_s)


def _check_counts(n_stages: int, n_microbatches: int, n_atoms: int, solver: str) -> None:
    broken = []
    if solver not in SOLVERS:
        broken.append(f"there is no solver {solver!r}: use one of {', '.join(SOLVERS)}")
    if n_microbatches < 1:
        broken.append(f"{n_microbatches} micro-batches: a step needs at least 1")
    if n_stages < 1:
        broken.append(f"{n_stages} stages: a plan needs at least 1")
    elif n_stages > n_atoms:
        broken.append(too_few_blocks(n_stages, n_atoms))
    if broken:
        raise PlanError("; ".join(broken))


def _does_not_fit(problem: Problem, estimate: Estimate, checkpoint: CheckpointMode) -> str:
    peaks = zip(estimate.peak_bytes, problem.capacity_bytes, strict=True)
    over = [peak - capacity for peak, capacity in peaks]
    device = over.index(max(over))
    peak, capacity = estimate.peak_bytes[device], problem.capacity_bytes[device]
    places = problem.schedule.stage_to_device
    stages = [
        stage for stage, place in zip(estimate.stages, places, strict=True) if place == device
    ]
    static = static_bytes(estimate, places, device, problem.training_factor)
    held = problem.chain.library_bytes
    # What of the chain is least together on one device, at its largest.
    least = max(
        sum(held_at_rest(problem.chain, begin, end, problem.training_factor).values())
        for begin, end in pairwise(problem.edges)
    )
    help_by = []
    if problem.n_stages < len(problem.edges) - 1 and least < capacity:
        help_by.append(f"more than {problem.n_devices} devices")
    if static < capacity:
        help_by.append("smaller micro-batches (more of them)")
        if checkpoint is not CheckpointMode.ALWAYS:
            help_by.append("`--checkpoint auto`")
    return (
        f"no partition fits: in the best one found, device {device} needs {size_text(peak + held)} "
        f"and has {size_text(capacity + held)} (parameters and what training keeps of them "
        f"{size_text(static)}, saved for one micro-batch "
        f"{size_text(sum(stage.saved_bytes for stage in stages))}). What would help: "
        f"{', or '.join(help_by) or 'devices with more memory'}"
    )
