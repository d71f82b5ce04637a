"""A plan's step where a host launches what its devices do, which they may have to wait for."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fxpipe.ir import GIVEN, Chain, Network, Plan
from fxpipe.passes.checkpoints import recompute_table
from fxpipe.passes.order_whole import whole_where_it_pays
from fxpipe.passes.partition_costs import evaluate, segmented_costs
from fxpipe.passes.simulate_launches import Hosts
from fxpipe.passes.simulate_together import together_bytes


def with_launches(
    chain: Chain,
    plan: Plan,
    network: Network,
    capacity_bytes: Sequence[int],
    training_factor: float,
    hosts: Hosts,
) -> Plan:
    """The plan whose estimate waits for `hosts`; without that it takes what `captured_ms` says.

    Halves of a backward are launched one by one: of a table that is not given, fewer may pay.
    """
    under = partial(
        evaluate,
        chain,
        plan.cuts,
        checkpoint=plan.checkpoint,
        network=network,
        training_factor=training_factor,
        segments=plan.segments,
    )
    waiting = partial(under, hosts=hosts)
    table = plan.schedule
    if plan.schedule_name != GIVEN:
        table = whole_where_it_pays(table, waiting, capacity_bytes)
    alone, found = under(schedule=table), waiting(schedule=table)
    # Captured as a graph it has to fit as well.
    peaks = map(max, found.peak_bytes, alone.peak_bytes)
    together = None
    if not hosts.apart:  # processes share no memory
        stages, messages = segmented_costs(chain, plan.cuts, training_factor, plan.segments)
        recompute = recompute_table(plan.checkpoint, table.n_microbatches)
        launched = hosts.launched(chain, plan.cuts, table, recompute, plan.segments)
        together = together_bytes(table, stages, messages, network, recompute, launched)
    estimate = replace(
        found,
        peak_bytes=tuple(peaks),
        together_bytes=together,
        captured_ms=alone.step_ms,
    )
    return replace(plan, schedule=table, estimate=estimate)
