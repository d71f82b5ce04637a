"""How long devices must wait because the longest stage sets the pace, however stages are cut.

Let runs of blocks lie on one device each, neighbours on two. Micro-batches follow one another
through each: the one that comes i-th, from 0, is late by i times the longest. So runs should be
short; but the shorter they are, the more messages each micro-batch has behind it.

To say which run is the longest, let T be the chain's forward, and of a run of g ms that begins
after b ms of it let min(g, (T - b) / (m - 1)) count; the pace s is the most of these. A run that
begins before T - (m - 1) * s is then no longer than s, and there are messages between those runs:
let h be the least that they take. At T + h, before any backward, the i-th micro-batch

- has come through the run of that pace: then it was late by i * s, and has h or more behind it, if
  it has come to T - (m - 1) * s at all;
- or is in that run or before it: at T - (m - 1) * s at most.

Either way, of its T + h it was forwarded for no more than T - i * s. That no order of micro-batches
does better is a flow shop's bound: a run's device has one of them at a time.

There are messages behind that too. Let H be all that the first micro-batch has behind it at T + H
+ t, and G the longest run up to where the i-th then is, x ms of the forward, with M of the messages
behind it. Then x + M + i * G is no more than T + H + t, nor is x more than T: of that time it was
not forwarded for M + max(i * G, t) or more. There G is no less than s, and either x is T + t - i *
G at least, and M what runs that are no longer need to come there; or it is less, which is as if G
were longer.
"""

from heapq import heapify, heappop, heappush

import numpy as np

from fxpipe.passes.bound.atoms import Atoms
from fxpipe.passes.bound.flow import backwards_by, turn_times
from fxpipe.passes.bound.pace_kernel import least_messages_ms

# Two paces that are as near to each other are one. Longer runs are looked at in such steps.
_NEAR, _LONGER = 1 + 1e-7, 1.03


def pace_ms(atoms: Atoms, n_devices: int, n_microbatches: int) -> float:
    """The least that so many devices wait in all, in ms, until the busiest time of the turn.

    Says little where there are many more micro-batches than devices.
    """
    m, forward_ms = n_microbatches, float(atoms.before[-1])
    later = max(m - 1, 1)
    times = turn_times(atoms)
    back = backwards_by(atoms, m, times)
    ranks = np.arange(m)[:, None]

    def least_ms(slowest: float, fastest: float) -> float:
        """What devices wait at least whose pace lies between these two."""
        early_ms = forward_ms - later * slowest

        def messages_ms(longest_late_ms: float, until_ms: float) -> float:
            limits = slowest, early_ms, longest_late_ms, until_ms
            return least_messages_ms(atoms.before, atoms.messages, *limits)  # type: ignore[no-any-return]

        def late_ms(rank: int, t: float, n_waiting: int) -> float:
            """For how long it isn't forwarded, and others wait for the messages behind it."""
            least = n_waiting * early_messages_ms + forward_ms + t
            longest, next_longest = fastest, slowest
            while (late := max(rank * longest, t)) + n_waiting * early_messages_ms < least:
                until_ms = forward_ms - max(rank * next_longest - t, 0.0)
                behind_ms = max(early_messages_ms, messages_ms(next_longest, until_ms))
                least = min(least, late + n_waiting * behind_ms)
                longest, next_longest = next_longest, _LONGER * next_longest
            return least

        early_messages_ms = messages_ms(slowest, early_ms)
        forwards = np.clip(forward_ms + times - ranks * fastest, 0.0, forward_ms).sum(axis=0)
        waits = n_devices * (forward_ms + early_messages_ms + times) - forwards - back
        busiest = int(np.argmax(waits))
        t, beyond = float(times[busiest]), n_devices - m
        # The first micro-batch, and devices beyond their number, wait for H, which is no less than
        # what the second has behind it.
        apart_ms = t + beyond * (forward_ms + t) - float(back[busiest])
        apart_ms += sum(late_ms(i, t, beyond + 2 if i == 1 else 1) for i in range(1, m))
        return max(float(waits[busiest]), apart_ms)

    fastest = float(np.minimum(atoms.forward, (forward_ms - atoms.before[:-1]) / later).max())
    paces = [forward_ms, fastest]
    open_ = [(least_ms(*paces), *paces)]
    heapify(open_)
    while True:
        waits_ms, slowest, fastest = heappop(open_)
        if slowest <= _NEAR * fastest:
            return waits_ms
        middle = (slowest * fastest) ** 0.5
        heappush(open_, (least_ms(slowest, middle), slowest, middle))
        heappush(open_, (least_ms(middle, fastest), middle, fastest))
