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
"""

from collections import deque
from heapq import heapify, heappop, heappush

import numpy as np

from fxpipe.passes.bound.atoms import Atoms
from fxpipe.passes.bound.flow import backwards_by, turn_times

# Two paces that are as near to each other are one.
_NEAR = 1 + 1e-7


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
        messages_ms = _messages_ms(atoms, slowest, forward_ms - later * slowest)
        forwards = np.clip(forward_ms + times - ranks * fastest, 0.0, forward_ms).sum(axis=0)
        return float(np.max(n_devices * (forward_ms + messages_ms + times) - forwards - back))

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


def _messages_ms(atoms: Atoms, longest_ms: float, until_ms: float) -> float:
    """The least that messages take between runs that begin before `until_ms` of the forward.

    They are no longer than `longest_ms`, nor is the way from the last message to there.
    """
    begins, longest_ms = atoms.before.tolist(), longest_ms * (1 + 1e-9)
    # Of the places behind which a run may begin that are near enough, with the least that messages
    # take up to there: those farther on come after those that take less.
    near = deque([(0.0, 0.0)])
    for begin_ms, message_ms in zip(begins[1:], [*atoms.messages.tolist(), 0.0], strict=True):
        while near[0][0] < min(begin_ms, until_ms) - longest_ms:
            near.popleft()
        if begin_ms >= until_ms:
            break
        taken_ms = near[0][1] + message_ms
        while near and near[-1][1] >= taken_ms:
            near.pop()
        near.append((begin_ms, taken_ms))
    return near[0][1]
