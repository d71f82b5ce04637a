"""What waits until there is room where it is sent to, so that no device holds more than predicted.

The simulator counts a message from when it thinks that it comes. In a step it may come sooner: the
device that sends it may be ahead of its times, or the one that gets it behind. So each message has
an action of the device that gets it, which must have ended before it is sent: the earliest after
which there is room for it under that device's peak, and at the latest the last one that, as
predicted, has ended when the action that sends it begins.

Nothing waits in a circle: what is waited for ends, by the predicted times, before what waits does.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import replace

from fxpipe.ir import Chain, Estimate, Plan, Wait
from fxpipe.passes.partition_stages import stage_costs
from fxpipe.schedule import Action, Kind

_Bytes = dict[tuple[int, bool], Counter[int]]


def with_waits(chain: Chain, plan: Plan) -> Plan:
    """The plan whose messages wait for room."""
    n_bytes = _sent_bytes(chain, plan)
    devices = range(len(plan.schedule.rows))
    found = [wait for device in devices for wait in _waits(plan, n_bytes, device)]
    return replace(plan, estimate=replace(plan.estimate, waits=tuple(found)))


def _sent_bytes(chain: Chain, plan: Plan) -> _Bytes:
    """What each stage sends to each device after F (True) and after its backward (False)."""
    place = plan.stage_to_device
    sent: _Bytes = {(j, ahead): Counter() for j in range(len(place)) for ahead in (True, False)}
    for message in stage_costs(chain, plan.cuts)[1]:
        source, target = place[message.source], place[message.target]
        if source != target:
            sent[message.source, True][target] += message.bytes
            sent[message.target, False][source] += message.gradient_bytes or 0
    return sent


def _waits(plan: Plan, n_bytes: _Bytes, device: int) -> list[Wait]:
    """Those of what is sent to `device`."""
    row, estimate = plan.schedule.rows[device], plan.estimate
    ends = [end for _, end in estimate.spans[device]]
    fullest, most = _fullest(estimate, device), estimate.peak_bytes[device]
    found = []
    for start, action, size in _arrivals(plan, n_bytes, device):
        first = bisect_right(ends, start)
        while first > 0 and fullest[first - 1] + size <= most:
            first -= 1
            fullest[first] += size
        if first > 0:
            found.append(Wait(action, row[first - 1]))
    return found


def _arrivals(plan: Plan, n_bytes: _Bytes, device: int) -> list[tuple[float, Action, int]]:
    """The actions that send something to `device`, when they begin, and how much they send."""
    return sorted(
        (start, action, size)
        for row, spans in zip(plan.schedule.rows, plan.estimate.spans, strict=True)
        for action, (start, end) in zip(row, spans, strict=True)
        if action.kind is not Kind.WEIGHT
        and start < end
        and (size := n_bytes[action.stage, action.kind is Kind.FORWARD][device])
    )


def _fullest(estimate: Estimate, device: int) -> list[int]:
    """What the device holds at most until its first action ends, from then to the next, and so on.

    This only grows until an action ends.
    """
    ends = [end for _, end in estimate.spans[device]]
    fullest = [0] * (len(ends) + 1)
    for ms, held in estimate.memory[device]:
        k = bisect_right(ends, ms)
        fullest[k] = max(fullest[k], held)
    return fullest
