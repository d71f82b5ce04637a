"""What devices hold besides where each has a process, which sends and receives by itself."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fxpipe.ir import Chain, Network, Plan
from fxpipe.passes.partition_stages import stage_costs
from fxpipe.runtime.distributed.messages import most_leaving

# What is set aside for messages asked for ahead: a share of a device's peak, so many bytes at most.
_AHEAD_SHARE, _AHEAD_BYTES = 0.02, 2**20


def with_messages_held(
    chain: Chain, plan: Plan, network: Network, capacity_bytes: Sequence[int]
) -> Plan:
    """The plan whose peaks count what its processes hold of messages, where there is room for it.

    What is sent is let go of some at a time, a message at least, which may wait until it is asked
    for, while the next one is made. And to ask another process for a message wakes it, which takes
    a processor as long as some small ops do: there is room to ask for several at once.
    """
    if network.link.value_ms == 0:
        return plan
    sent = Counter[tuple[int, int]]()  # over a step
    largest = Counter[tuple[int, int]]()
    for message in stage_costs(chain, plan.cuts)[1]:
        source, target = (plan.stage_to_device[j] for j in (message.source, message.target))
        values, gradients = message.bytes, message.gradient_bytes or 0
        for pair, n_bytes in (((source, target), values), ((target, source), gradients)):
            sent[pair] += plan.schedule.n_microbatches * n_bytes
            largest[pair] = max(largest[pair], n_bytes)
    peaks, ahead = [], []
    for d, (peak, capacity) in enumerate(
        zip(plan.estimate.peak_bytes, capacity_bytes, strict=True)
    ):
        leaving = sum(
            min(n_bytes, most_leaving(largest[pair]) + largest[pair])
            for pair, n_bytes in sent.items()
            if pair[0] == d != pair[1]
        )
        ahead.append(max(0, min(int(_AHEAD_SHARE * peak), _AHEAD_BYTES, capacity - peak - leaving)))
        peaks.append(min(peak + leaving, capacity) + ahead[d])
    estimate = replace(plan.estimate, peak_bytes=tuple(peaks), ahead_bytes=tuple(ahead))
    return replace(plan, estimate=estimate)
