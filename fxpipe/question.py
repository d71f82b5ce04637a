"""What is planned, for which devices; and the plan, by the search or by a solver of cuts."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from fxpipe.costs.topology import between_processors
from fxpipe.errors import PlanError
from fxpipe.ir import GIVEN, Chain, CheckpointMode, Network, Plan
from fxpipe.passes.launching import Hosts
from fxpipe.passes.partition import partition
from fxpipe.passes.partition_hosts import with_launches
from fxpipe.passes.partition_processes import with_messages_held
from fxpipe.passes.search.named import named_candidates
from fxpipe.passes.search.plan import LOOPS, TIME_LIMIT_S, search
from fxpipe.passes.search.plan import NAME as AUTO
from fxpipe.runtime.manifest import CandidateSpec
from fxpipe.schedule import Schedule

_FEW = 2  # stages a device


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned, for which devices.

    `checkpoint` is a mode, or `auto`: then parts of stages may be computed again. A device holds
    `loops` stages; where that is None, the search tries each of `tried_loops`. Devices that are
    `processors` send by themselves, if not within one process. GPUs wait for their `hosts`.
    """

    chain: Chain
    n_devices: int
    n_microbatches: int
    network: Network
    capacity_bytes: tuple[int, ...]
    training_factor: float
    checkpoint: str = CheckpointMode.NEVER
    loops: int | None = None
    tried_loops: tuple[int, ...] = LOOPS
    processors: bool = False
    hosts: Hosts | None = None

    @property
    def recompute(self) -> bool:
        """Whether the search may compute blocks again."""
        return self.checkpoint == AUTO

    def over(self, links: Network) -> "Question":
        """The same over the links of a topology, in place of measured ones, a process a device."""
        return replace(
            self,
            network=between_processors(links) if self.processors else links,
            hosts=self.hosts and replace(self.hosts, apart=True),
        )


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
            capacity_bytes=q.capacity_bytes,
            training_factor=q.training_factor,
            recompute=q.recompute,
            table=table,
            schedule_name=schedule if isinstance(schedule, str) else GIVEN,
            seed=seed,
            n_workers=workers,
            progress=progress,
        )
        plan = _searched(q, table is None, sought, time_limit_s)
    else:
        plan = partition(
            q.chain,
            n_stages=table.n_stages,
            n_microbatches=q.n_microbatches,
            loops=max(Counter(table.stage_to_device).values()),
            schedule=schedule,
            checkpoint=CheckpointMode(q.checkpoint),
            network=q.network,
            capacity_bytes=q.capacity_bytes,
            training_factor=q.training_factor,
            solver=solver,
        )
        plan = _waiting(q, plan)
    return with_messages_held(q.chain, plan, q.network, q.capacity_bytes)


def _searched(q: Question, free: bool, sought: Callable[..., Plan], time_limit_s: float) -> Plan:
    """What is `sought`; the number of stages is `free`, or that of a table.

    The search knows of devices alone. Where hosts matter, each further stage costs them time, so
    that half of the search goes to plans of few.
    """
    loops = q.tried_loops if q.loops is None else (q.loops,)
    few = tuple(number for number in loops if number <= _FEW)
    tries = [loops]
    if free and q.hosts and q.hosts.matter(q.chain, q.n_devices) and few:
        tries = [few, loops] if few != loops else [few]
    found, unfit = [], []
    for one in tries:
        try:
            plan = sought(loops=one, time_limit_s=time_limit_s / len(tries))
            found.append(_waiting(q, plan))
        except PlanError as error:
            unfit.append(error)
    if not found:
        raise unfit[-1]
    return min(found, key=lambda plan: plan.estimate.step_ms)


def _waiting(q: Question, plan: Plan) -> Plan:
    """The plan, whose step waits for hosts if there are any."""
    if q.hosts is None:
        return plan
    return with_launches(q.chain, plan, q.network, q.training_factor, q.hosts)


def weighed_against(question: Question) -> Iterator[CandidateSpec]:
    """The named schedules on cuts of equal time, which a plan is shown beside."""
    q = question
    mode = CheckpointMode.NEVER if q.recompute else CheckpointMode(q.checkpoint)
    return named_candidates(
        q.chain,
        n_devices=q.n_devices,
        n_microbatches=q.n_microbatches,
        checkpoint=mode,
        network=q.network,
        capacity_bytes=q.capacity_bytes,
        training_factor=q.training_factor,
        hosts=q.hosts,
    )
