"""Plans of one chain beside each other: the named schedules and what the search finds."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fxpipe.chain_file import ChainFile
from fxpipe.costing import costed
from fxpipe.costs.criterion import Loss
from fxpipe.costs.optimizer import optimizer_of
from fxpipe.costs.profile_file import costs_of, is_analytic
from fxpipe.errors import FxpipeError
from fxpipe.ir import GIVEN, Chain, CheckpointMode, Network, Plan
from fxpipe.passes import order
from fxpipe.passes.bound.lower import bytes_free, lower_bound_ms
from fxpipe.passes.linearize import linearize
from fxpipe.passes.partition import partition
from fxpipe.passes.partition_costs import edges_of
from fxpipe.passes.partition_processes import with_messages_held
from fxpipe.passes.search.plan import LOOPS, chain_loops, search
from fxpipe.runtime.stream import parse_devices
from fxpipe.schedule import Schedule
from fxpipe.settings import table_of
from fxpipe.show.progress import Progress
from fxpipe.target import load


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned, for which devices. `recompute`: blocks may be computed again.

    A device holds `loops` stages; where that is None, the search tries each of `tried_loops`.
    Devices that are `processors` send by themselves, if not within one process.
    """

    chain: Chain
    n_devices: int
    n_microbatches: int
    network: Network
    capacity_bytes: tuple[int, ...]
    training_factor: float
    recompute: bool = False
    loops: int | None = None
    tried_loops: tuple[int, ...] = LOOPS
    processors: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """A schedule's plan, or why there is none, and how long it took to find."""

    schedule: str
    plan: Plan | None
    why_not: str
    seconds: float


def chain_question(file: ChainFile, devices: str, microbatches: int | None) -> Question:
    """A bare chain's; on twice as many micro-batches as devices if nothing is said."""
    n_devices = len(parse_devices(devices))
    return Question(
        chain=file.chain,
        n_devices=n_devices,
        n_microbatches=microbatches or 2 * n_devices,
        network=file.network,
        capacity_bytes=(file.capacity_bytes,) * n_devices,
        training_factor=file.training_factor,
        tried_loops=chain_loops(n_devices),
    )


def model_question(
    target: str,
    devices: str,
    batch: int,
    microbatches: int | None,
    profile: str | None,
    optimizer: str,
) -> Question:
    """A model's, whose ops are measured here unless `profile` tells what they cost."""
    lanes = parse_devices(devices)
    held = optimizer_of(optimizer)
    m = microbatches or min(batch, 2 * len(lanes))
    loaded = load(target)
    costs = None if profile is None else costs_of(profile)
    inputs = loaded.inputs(batch)
    model = loaded.build_without_memory() if is_analytic(costs) else loaded.build()
    loaded.check_rows(inputs, batch, model)
    with Progress() as progress, loaded.running(f"{type(model).__name__}.forward"):
        captured, priced = costed(
            model,
            inputs.args,
            inputs.kwargs,
            devices=lanes,
            microbatches=m,
            loss=Loss.of(loaded.loss, loaded.targets(batch)),
            profile=costs,
            progress=progress,
        )
        progress("linearize")
        chain = linearize(captured, priced)
    return Question(
        chain=chain,
        n_devices=len(lanes),
        n_microbatches=m,
        network=priced.network,
        capacity_bytes=(priced.capacity_bytes,) * len(lanes),
        training_factor=held.training_factor(model.parameters()),
        processors=priced.on_processors,
    )


def answered(
    question: Question,
    schedule: str | Schedule,
    *,
    seed: int,
    workers: int | None,
    time_limit_s: float,
    progress: Callable[[float], None] = lambda _: None,
) -> Answer:
    """The best plan that the search finds, or, of one schedule, what `compile` would make.

    Raises PlanError.
    """
    q = question
    start = time.perf_counter()
    name = schedule if isinstance(schedule, str) else GIVEN
    table = table_of(schedule, q.n_devices, q.n_microbatches, q.loops)
    if table is not None and not q.recompute:
        loops = max(Counter(table.stage_to_device).values())
        plan = _cut(q, schedule, table.n_stages, loops, _bound_ms(q))
        return Answer(name, plan, "", time.perf_counter() - start)
    plan = search(
        q.chain,
        schedule_name=name,
        n_devices=q.n_devices,
        n_microbatches=q.n_microbatches,
        network=q.network,
        capacity_bytes=q.capacity_bytes,
        training_factor=q.training_factor,
        recompute=q.recompute,
        loops=q.tried_loops if q.loops is None else (q.loops,),
        table=table,
        seed=seed,
        n_workers=workers,
        time_limit_s=time_limit_s,
        progress=progress,
    )
    plan = with_messages_held(q.chain, plan, q.network, q.capacity_bytes)
    return Answer(name, plan, "", time.perf_counter() - start)


def named(question: Question) -> Iterator[Answer]:
    """Each named schedule, its cuts by dynamic programming, nothing computed again."""
    q = question
    bound_ms = _bound_ms(q)
    for name in order.NAMES:
        loops = q.loops or order.usual_loops(name, q.n_devices)
        start = time.perf_counter()
        try:
            plan = _cut(q, name, q.n_devices * loops, loops, bound_ms)
            yield Answer(name, plan, "", time.perf_counter() - start)
        except FxpipeError as error:
            yield Answer(name, None, str(error), time.perf_counter() - start)


def _bound_ms(q: Question) -> float:
    free = bytes_free(q.chain, q.capacity_bytes, q.training_factor)
    edges = edges_of(q.chain)
    return lower_bound_ms(q.chain, edges, q.n_devices, q.n_microbatches, q.network, free)


def _cut(q: Question, schedule: str | Schedule, n_stages: int, loops: int, bound_ms: float) -> Plan:
    plan = partition(
        q.chain,
        n_stages=n_stages,
        n_microbatches=q.n_microbatches,
        schedule=schedule,
        checkpoint=CheckpointMode.NEVER,
        network=q.network,
        capacity_bytes=q.capacity_bytes,
        solver="dp",
        loops=loops,
        training_factor=q.training_factor,
    )
    plan = with_messages_held(q.chain, plan, q.network, q.capacity_bytes)
    return replace(plan, bound_ms=bound_ms)
