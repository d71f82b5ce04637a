"""Plans of one chain beside each other: the named schedules and what the search finds."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from fxpipe.chain_file import ChainFile
from fxpipe.costing import costed
from fxpipe.costs.criterion import Loss
from fxpipe.costs.optimizer import optimizer_of
from fxpipe.costs.profile_file import is_analytic
from fxpipe.errors import FxpipeError, PlanError
from fxpipe.ir import GIVEN, CheckpointMode, Plan, Profile
from fxpipe.passes import order
from fxpipe.passes.bound.lower import bytes_free, lower_bound_ms
from fxpipe.passes.linearize import linearize
from fxpipe.passes.partition_costs import edges_of
from fxpipe.passes.search.plan import chain_loops
from fxpipe.passes.simulate_launches import Hosts
from fxpipe.planned import planned
from fxpipe.question import Question
from fxpipe.runtime.stream import Device
from fxpipe.schedule import Schedule
from fxpipe.settings import table_of
from fxpipe.show.progress import Progress
from fxpipe.show.texts import plural
from fxpipe.target import load

_NAMED_S = 1.0  # the search for a named schedule's cuts and for what is computed again


@dataclass(frozen=True, slots=True)
class Answer:
    """A schedule's plan, or why there is none, and how long it took to find."""

    schedule: str
    plan: Plan | None
    why_not: str
    seconds: float

    @property
    def step_ms(self) -> float:
        """Of its plan, endless if there is none."""
        return inf if self.plan is None else self.plan.estimate.step_ms


def chain_question(file: ChainFile, n_devices: int, microbatches: int) -> Question:
    """A bare chain's, whose file has its costs."""
    return Question(
        chain=file.chain,
        n_devices=n_devices,
        n_microbatches=microbatches,
        network=file.network,
        capacity_bytes=(file.capacity_bytes,) * n_devices,
        training_factor=file.training_factor,
        tried_loops=chain_loops(n_devices),
    )


def model_questions(
    target: str,
    lanes: Sequence[Device],
    batch: int,
    counts: Sequence[int],
    costs: Profile | str | None,
    optimizer: str,
) -> list[Question]:
    """A model's in each of these counts of micro-batches that it takes.

    Its ops are measured here unless `costs` tell what they take.
    """
    held = optimizer_of(optimizer)
    loaded = load(target)
    model = loaded.build_without_memory() if is_analytic(costs) else loaded.build()
    inputs = loaded.inputs(batch, model)
    with Progress() as progress, loaded.running(f"{type(model).__name__}.forward"):
        captured, profiles = costed(
            model,
            inputs.args,
            inputs.kwargs,
            devices=lanes,
            counts=counts,
            loss=Loss.of(loaded.loss, loaded.targets(batch)),
            profile=costs,
            progress=progress,
        )
        progress("linearize")
        chains = [linearize(captured, priced) for priced in profiles.values()]
    return [
        Question(
            chain=chain,
            n_devices=len(lanes),
            n_microbatches=count,
            network=priced.network,
            capacity_bytes=(priced.capacity_bytes,) * len(lanes),
            training_factor=held.training_factor(model.parameters()),
            processors=priced.on_processors,
            hosts=Hosts.of(priced.launch),
        )
        for (count, priced), chain in zip(profiles.items(), chains, strict=True)
    ]


def shortest(
    questions: Sequence[Question], answer: Callable[[Question], Answer]
) -> tuple[Question, Answer, list[Answer]]:
    """Of questions that differ in their micro-batches, the one whose plan is shortest, and its.

    With what came of the others. Raises PlanError where there is no plan of any.
    """
    found: list[tuple[Question, Answer]] = []
    unfit: list[PlanError] = []
    for question in questions:
        try:
            found.append((question, answer(question)))
        except PlanError as error:
            unfit.append(error)
    if not found:
        raise unfit[-1]
    best = min(found, key=lambda one: one[1].step_ms)
    others = [
        replace(one, schedule=f"{one.schedule} in {plural(q.n_microbatches, 'micro-batch', 'es')}")
        for q, one in found
        if one is not best[1]
    ]
    return *best, others


def answered(
    question: Question,
    schedule: str | Schedule,
    table: Schedule | None,
    *,
    seed: int,
    workers: int | None,
    time_limit_s: float,
    progress: Callable[[float], None] = lambda _: None,
) -> Answer:
    """The best plan that the search finds, or, of one schedule, what `compile` would make.

    `table` is the schedule's, None if it is searched. Raises PlanError.
    """
    start = time.perf_counter()
    plan = planned(
        question,
        schedule,
        table,
        seed=seed,
        workers=workers,
        time_limit_s=time_limit_s,
        progress=progress,
    )
    if plan.bound_ms is None:
        plan = replace(plan, bound_ms=_bound_ms(question))
    name = schedule if isinstance(schedule, str) else GIVEN
    return Answer(name, plan, "", time.perf_counter() - start)


def named(question: Question, *, seed: int, workers: int | None) -> Iterator[Answer]:
    """Each named schedule, its cuts by dynamic programming.

    Where blocks may be computed again, by a short search for cuts and for these blocks.
    """
    q, bound_ms = question, _bound_ms(question)
    for name in order.NAMES:
        start = time.perf_counter()
        try:
            table = table_of(name, q.n_devices, q.n_microbatches, q.loops)
            plan = planned(q, name, table, seed=seed, workers=workers, time_limit_s=_NAMED_S)
            plan = replace(plan, bound_ms=bound_ms)
            yield Answer(name, plan, "", time.perf_counter() - start)
        except FxpipeError as error:
            yield Answer(name, None, str(error), time.perf_counter() - start)


def one_device_ms(question: Question) -> float | None:
    """The step on one device alone, the largest, nothing computed again; None if it doesn't fit.

    Where messages take long, that is shorter than on all of them.
    """
    alone = replace(
        question,
        n_devices=1,
        capacity_bytes=(max(question.capacity_bytes),),
        checkpoint=CheckpointMode.NEVER,
        loops=None,
    )
    with suppress(PlanError):
        plan = planned(alone, "1f1b", table_of("1f1b", 1, alone.n_microbatches, None))
        return plan.estimate.step_ms
    return None


def _bound_ms(q: Question) -> float:
    free = None if q.recompute else bytes_free(q.chain, q.room_bytes, q.training_factor)
    edges = edges_of(q.chain)
    bound_ms = lower_bound_ms(q.chain, edges, q.n_devices, q.n_microbatches, q.network, free)
    return max(bound_ms, q.least_launch_ms)
