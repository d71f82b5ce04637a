"""The plan of a question, by the search or by a solver of cuts, and what it is weighed against."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from operator import le

from fxpipe.errors import PlanError
from fxpipe.ir import GIVEN, CheckpointMode, Plan
from fxpipe.passes.partition import partition
from fxpipe.passes.partition_launches import with_launches
from fxpipe.passes.partition_libraries import with_libraries_held
from fxpipe.passes.partition_processes import with_messages_held
from fxpipe.passes.partition_tidy import MOST_LONGER
from fxpipe.passes.partition_waits import with_waits
from fxpipe.passes.search.named import candidate, named_plans
from fxpipe.passes.search.plan import NAME as AUTO
from fxpipe.passes.search.plan import TIME_LIMIT_S, search
from fxpipe.question import Question
from fxpipe.runtime.manifest import CandidateSpec
from fxpipe.schedule import Schedule

_FEW = 2  # stages a device


def planned(
    question: Question,
    schedule: str | Schedule,
    table: Schedule | None,
    *,
    solver: str = "dp",
    seed: int = 0,
    workers: int | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    progress: Callable[[float], None] = lambda _: None,
) -> Plan:
    """The plan under `schedule`, whose `table` is None if its order is left to the search.

    By the search if anything is left to it, else by the `solver`. Raises PlanError.
    """
    q = question
    if table is None or q.recompute:
        sought = partial(
            search,
            q.chain,
            n_devices=q.n_devices,
            n_microbatches=q.n_microbatches,
            network=q.network,
            capacity_bytes=q.room_bytes,
            training_factor=q.training_factor,
            recompute=q.recompute,
            table=table,
            schedule_name=schedule if isinstance(schedule, str) else GIVEN,
            seed=seed,
            n_workers=workers,
            progress=progress,
        )
        waits = schedule == AUTO and q.hosts and q.hosts.matter(q.chain, q.n_devices)
        seek = _beside_hosts if waits else _searched
        plan = seek(q, sought, time_limit_s)
    else:
        plan = partition(
            q.chain,
            n_stages=table.n_stages,
            n_microbatches=q.n_microbatches,
            loops=max(Counter(table.stage_to_device).values()),
            schedule=schedule,
            checkpoint=CheckpointMode(q.checkpoint),
            network=q.network,
            capacity_bytes=q.room_bytes,
            training_factor=q.training_factor,
            solver=solver,
        )
        plan = _waiting(q, plan)
    if q.processors:
        plan = with_waits(q.chain, plan)
    plan = with_messages_held(q.chain, plan, q.network, q.room_bytes)
    return with_libraries_held(plan, q.chain.library_bytes)


def _searched(q: Question, sought: Callable[..., Plan], time_limit_s: float) -> Plan:
    """What is `sought`, of all numbers of stages that are asked for at once."""
    loops = q.tried_loops if q.loops is None else (q.loops,)
    return _waiting(q, sought(loops=loops, time_limit_s=time_limit_s))


def _beside_hosts(q: Question, sought: Callable[..., Plan], time_limit_s: float) -> Plan:
    """The same where hosts matter, of which the search knows nothing.

    Each further stage costs them time: half of the search goes to plans of few stages, and a named
    schedule on cuts of equal time is taken if it is shorter. Many take as long as launching does:
    of steps that are about as short, and no longer than any named schedule's, it is the one that
    holds least.
    """
    every = q.tried_loops if q.loops is None else (q.loops,)
    few = tuple(number for number in every if number <= _FEW) or every
    tries = [few, every] if few != every else [every]
    found, unfit, named_ms = [], [], inf
    for loops in tries:
        try:
            plan = sought(loops=loops, time_limit_s=time_limit_s / len(tries))
            found.append(_waiting(q, plan))
        except PlanError as error:
            unfit.append(error)
    if q.loops is None:
        rooms = q.room_bytes
        fitting = [plan for plan in _named(q) if all(map(le, plan.estimate.peak_bytes, rooms))]
        if fitting:
            shortest_ms = min(plan.estimate.step_ms for plan in fitting)
            bound_ms = found[0].bound_ms if found else None
            lean = _leanest(q, fitting, shortest_ms)
            named = _waiting(q, replace(lean, schedule_name=AUTO, bound_ms=bound_ms))
            named_ms = named.estimate.step_ms
            found.append(named)
    if not found:
        raise unfit[-1]
    longest_ms = MOST_LONGER * min(plan.estimate.step_ms for plan in found)
    return _leanest(q, found, min(named_ms, longest_ms))


def _leanest(q: Question, plans: Sequence[Plan], longest_ms: float) -> Plan:
    """Of the plans whose steps take no longer than that, the one that holds least."""
    rooms = q.room_bytes

    def held(plan: Plan) -> float:
        return max(peak / room for peak, room in zip(plan.estimate.peak_bytes, rooms, strict=True))

    return min((plan for plan in plans if plan.estimate.step_ms <= longest_ms), key=held)


def _waiting(q: Question, plan: Plan) -> Plan:
    """The plan, whose step, and its bound, wait for hosts if there are any."""
    if q.hosts is None:
        return plan
    plan = with_launches(q.chain, plan, q.network, q.room_bytes, q.training_factor, q.hosts)
    if plan.bound_ms is None:
        return plan
    return replace(plan, bound_ms=max(plan.bound_ms, q.least_launch_ms))


def _named(q: Question) -> Iterator[Plan]:
    """The named schedules on cuts of equal time, whether they fit or not."""
    return named_plans(
        q.chain,
        n_devices=q.n_devices,
        n_microbatches=q.n_microbatches,
        checkpoint=CheckpointMode.NEVER if q.recompute else CheckpointMode(q.checkpoint),
        network=q.network,
        capacity_bytes=q.room_bytes,
        training_factor=q.training_factor,
        hosts=q.hosts,
    )


def weighed_against(question: Question) -> Iterator[CandidateSpec]:
    """The named schedules on cuts of equal time, which a plan is shown beside."""
    for plan in _named(question):
        held = with_libraries_held(plan, question.chain.library_bytes)
        yield candidate(held.schedule_name, held.schedule, held.estimate, question.capacity_bytes)
