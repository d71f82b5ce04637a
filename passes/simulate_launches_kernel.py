"""When a host that launches for several devices comes to each action, on arrays alone."""

import numpy as np

from fxpipe.jit import compiled
from fxpipe.passes.simulate_event_kernel import FORWARD, WEIGHT


@compiled
def launched_by_one(  # type: ignore[no-untyped-def]
    row_ends, row_kinds, row_stages, row_microbatches, takes, serial, n_stages, n_microbatches
):  # fmt: skip
    """The moments by which each action of the table begins and ends to be launched, (2, actions).

    A thread for each row launches it in order, each action in `takes` of its own time; it waits
    until what it is given is launched, and for the share `serial` of an action no other thread gets
    on. The one that could first begin goes first.
    """
    n_devices = len(row_ends)
    launched = np.zeros((2, len(row_kinds)))
    # By way, stage and micro-batch: when F and the backward are launched.
    known = np.full((2, n_stages, n_microbatches), np.inf)
    next_of = np.zeros(n_devices, np.int64)
    next_of[1:] = row_ends[:-1]
    free = np.zeros(n_devices)
    lock_free = 0.0
    for _ in range(len(row_kinds)):
        first, at = -1, np.inf
        for d in range(n_devices):
            place = next_of[d]
            if place == row_ends[d]:
                continue
            j, i, kind = row_stages[place], row_microbatches[place], row_kinds[place]
            ready = free[d]
            if kind == FORWARD and j > 0:
                ready = max(ready, known[0, j - 1, i])
            elif kind not in (FORWARD, WEIGHT) and j < n_stages - 1:
                ready = max(ready, known[1, j + 1, i])
            if ready < at:
                first, at = d, ready
        if first < 0:
            break  # a table that can't run
        place = next_of[first]
        start = max(at, lock_free)
        end = start + takes[place]
        lock_free = start + serial * takes[place]
        launched[0, place], launched[1, place] = start, end
        free[first] = end
        next_of[first] += 1
        kind = row_kinds[place]
        if kind != WEIGHT:
            known[0 if kind == FORWARD else 1, row_stages[place], row_microbatches[place]] = end
    return launched
