"""A plan whose order CP-SAT seeks: its stages stand, the order of their actions is left open."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from fxpipe.errors import PlanError
from fxpipe.ir import Chain, Network, Plan
from fxpipe.passes import order_cpsat
from fxpipe.passes.checkpoints import recompute_table
from fxpipe.passes.order_problem import OrderProblem
from fxpipe.passes.partition_costs import evaluate, segmented_costs

NAME = "cpsat"
# Of nearly as many, CP-SAT held 0.7 GB and found no better order in half a minute.
_MOST_ACTIONS = 6000


def few_enough(loops: Sequence[int], n_devices: int, n_microbatches: int) -> tuple[int, ...]:
    """Of these numbers of stages a device, those with few enough actions to be ordered.

    Raises PlanError if there are none.
    """
    counts = {loop: 3 * loop * n_devices * n_microbatches for loop in loops}
    few = tuple(loop for loop in loops if counts[loop] <= _MOST_ACTIONS)
    if not few:
        raise PlanError(
            f"{n_devices} devices and {n_microbatches} micro-batches have {min(counts.values())} "
            f"actions at least, more than CP-SAT orders ({_MOST_ACTIONS}): use the schedule auto, "
            "or fewer micro-batches"
        )
    return few


def in_best_order(
    chain: Chain,
    plan: Plan,
    *,
    network: Network,
    capacity_bytes: Sequence[int],
    training_factor: float,
    seed: int,
    time_limit_s: float,
    n_workers: int,
) -> Plan:
    """The stages of `plan` in the best order that CP-SAT finds, and a bound for every order.

    Whole backwards stay so, in the bound too; halves that gain nothing are put together.
    """
    m = plan.schedule.n_microbatches
    stages, messages = segmented_costs(chain, plan.cuts, training_factor, plan.segments)
    problem = OrderProblem(
        stages=stages,
        messages=messages,
        network=network,
        devices=plan.stage_to_device,
        capacity_bytes=tuple(capacity_bytes),
        recompute=recompute_table(plan.checkpoint, m),
        whole=frozenset(product(range(len(stages)), range(m))) - plan.schedule.split,
    )
    table, bound_ms = order_cpsat.solve(
        problem, hint=plan.schedule, seed=seed, time_limit_s=time_limit_s, n_workers=n_workers
    )
    estimate = evaluate(
        chain,
        plan.cuts,
        schedule=table,
        checkpoint=plan.checkpoint,
        network=network,
        training_factor=training_factor,
        segments=plan.segments,
    )
    return replace(plan, schedule=table, estimate=estimate, solver=NAME, bound_ms=bound_ms)
