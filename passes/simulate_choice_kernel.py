"""Devices that choose: of what is ready and fits, the action that comes first in `rank`."""

import numpy as np

from fxpipe.jit import compiled
from fxpipe.passes.simulate_event_kernel import (
    ACTION,
    ARRIVES,
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    WHAT,
)

_NEVER = np.inf


@compiled
def reserved_bytes(device_of, recompute, split, workspace, comes_back, arriving, n_devices):  # type: ignore[no-untyped-def]
    """What each device leaves free, so that any of its actions can run: the most that one needs."""
    reserve = np.zeros(n_devices, np.int64)
    for j in range(len(device_of)):
        d = device_of[j]
        for i in range(recompute.shape[1]):
            again = 1 if recompute[j, i] else 0
            need = workspace[FORWARD, j, again]
            if split[j, i]:
                halves = max(workspace[INPUT, j, again], workspace[WEIGHT, j, again])
                need = max(need, halves) + arriving[j]
            else:
                need = max(need, workspace[BACKWARD, j, again])
            reserve[d] = max(reserve[d], need + comes_back[j, again])
    return reserve


@compiled
def choose(  # type: ignore[no-untyped-def]
    own, own_begin, own_end, nexts, missing, rank, split, keeps, recompute, reserve, held,
    promised, capacity, oldest, guarded, outbox_ends, receivers, sizes, device_of, d,
):  # fmt: skip
    """The action that device `d` starts: its kind and stage, or (-1, -1); does F lack room?

    An F leaves free what the `guarded` oldest micro-batches of the device still need.
    """
    n_microbatches = missing.shape[2]
    best, kind_found, stage_found, lacks_room = _NEVER, -1, -1, False
    for place in range(own_begin, own_end):
        j = own[place]
        i = nexts[2, j]
        if i < nexts[1, j] and rank[2, j, i] < best:
            best, kind_found, stage_found = rank[2, j, i], WEIGHT, j
        i = nexts[1, j]
        if i < n_microbatches and missing[1, j, i] == 0 and rank[1, j, i] < best:
            kind = INPUT if split[j, i] else BACKWARD
            best, kind_found, stage_found = rank[1, j, i], kind, j
        i = nexts[0, j]
        if i < n_microbatches and missing[0, j, i] == 0 and rank[0, j, i] < best:
            again = 1 if recompute[j, i] else 0
            need = keeps[j, again] + reserve[d]
            if i != oldest[d]:
                # What the oldest still need stays free, so that they can always end.
                until = min(i, oldest[d] + guarded)
                for k in range(own_begin, own_end):
                    other = own[k]
                    for older in range(max(nexts[0, other], oldest[d]), until):
                        need += keeps[other, 1 if recompute[other, older] else 0]
            fits = held[d] + promised[d] + need <= capacity[d]
            begin = outbox_ends[2 * j - 1] if j > 0 else 0
            for slot in range(begin, outbox_ends[2 * j]):
                e = device_of[receivers[slot]]
                room = capacity[e] - reserve[e] - held[e] - promised[e] - sizes[slot]
                fits = fits and (i == oldest[e] or room >= 0)
            if fits or i == oldest[d]:
                best, kind_found, stage_found = rank[0, j, i], FORWARD, j
            else:
                lacks_room = True
    return kind_found, stage_found, lacks_room


@compiled
def next_arrival(times, codes, size, d, kinds, stages, outbox_ends, receivers, device_of):  # type: ignore[no-untyped-def]
    """When the next message on its way arrives at device `d`."""
    soon = _NEVER
    for event in range(size):
        code = codes[event]
        if code >> WHAT == ARRIVES and times[event] < soon:
            action = (code >> ACTION) & ((1 << (WHAT - ACTION)) - 1)
            box = 2 * stages[action] + (0 if kinds[action] == FORWARD else 1)
            slot = code & ((1 << ACTION) - 1)
            slot += outbox_ends[box - 1] if box > 0 else 0
            if device_of[receivers[slot]] == d:
                soon = times[event]
    return soon
