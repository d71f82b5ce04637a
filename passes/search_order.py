"""A plan whose order CP-SAT seeks: its stages stand, the order of their actions is left open."""

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.errors import PlanError
from fxpipe.ir import Chain, Network, Plan
from fxpipe.passes import order_cpsat
from fxpipe.passes.checkpoints import recompute_table
from fxpipe.passes.order_problem import OrderProblem
from fxpipe.passes.partition_costs import evaluate, segmented_costs
from fxpipe.schedule import Kind

NAME = "cpsat"
_MOST_ACTIONS = 6000  # of more, CP-SAT finds no better order in minutes


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

    Whole backwards stay so, in the bound too; halves that gain nothing are put together. Raises
    PlanError where there are too many actions to begin with.
    """
    m, n = plan.schedule.n_microbatches, plan.schedule.n_stages
    if 3 * n * m > _MOST_ACTIONS:
        raise PlanError(
            f"{n} stages and {m} micro-batches have {3 * n * m} actions, more than CP-SAT orders "
            f"({_MOST_ACTIONS}): use the schedule auto, fewer micro-batches or fewer --loops"
        )
    stages, messages = segmented_costs(chain, plan.cuts, training_factor, plan.segments)
    problem = OrderProblem(
        stages=stages,
        messages=messages,
        network=network,
        devices=plan.stage_to_device,
        capacity_bytes=tuple(capacity_bytes),
        recompute=recompute_table(plan.checkpoint, m),
        whole=frozenset(
            (action.stage, action.microbatch)
            for row in plan.schedule.rows
            for action in row
            if action.kind is Kind.BACKWARD
        ),
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
