"""A plan's step where a host launches what its devices do, which they may have to wait for."""

from dataclasses import replace

from fxpipe.ir import Chain, Network, Plan
from fxpipe.passes.partition_costs import evaluate
from fxpipe.passes.simulate_launches import Hosts


def with_launches(
    chain: Chain, plan: Plan, network: Network, training_factor: float, hosts: Hosts
) -> Plan:
    """The plan whose estimate waits for `hosts`; without that it takes what `captured_ms` says."""
    found = evaluate(
        chain,
        plan.cuts,
        schedule=plan.schedule,
        checkpoint=plan.checkpoint,
        network=network,
        training_factor=training_factor,
        segments=plan.segments,
        hosts=hosts,
    )
    # Captured as a graph it has to fit as well.
    peaks = map(max, found.peak_bytes, plan.estimate.peak_bytes)
    estimate = replace(found, peak_bytes=tuple(peaks), captured_ms=plan.estimate.step_ms)
    return replace(plan, estimate=estimate)
