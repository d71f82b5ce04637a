"""Cuts by dynamic programming over a window of starts, on arrays alone."""

import numpy as np

from fxpipe.jit import compiled


@compiled
def least_communication(wait_ms, crossing_ms, first_starts, limit_ms):  # type: ignore[no-untyped-def]
    """Edges of the stages, first and last included, no stage's wait over `limit_ms`.

    By stage and edge, `wait_ms` is the wait up to it and `first_starts` the first edge from which a
    stage that ends there fits; `crossing_ms` is what a cut at each edge costs. Of all, those that
    cost least; none where there are none.
    """
    n, atoms = len(wait_ms), len(crossing_ms) - 1
    cost, after = np.full(atoms + 1, np.inf), np.empty(atoms + 1)
    cost[0] = 0.0
    came_from = np.zeros((n, atoms + 1), np.int64)
    window = np.empty(atoms + 1, np.int64)  # starts, from `first` to `last`, whose cost rises
    for j in range(n):
        after[:] = np.inf
        first, last, low, new = 0, 0, 0, j
        # Every stage before and after this one has an atom at least.
        for end in range(j + 1, atoms - (n - j - 1) + 1):
            while new < end:
                while last > first and cost[window[last - 1]] >= cost[new]:
                    last -= 1
                if cost[new] < np.inf:
                    window[last] = new
                    last += 1
                new += 1
            low = max(low, first_starts[j, end])
            while low < end and wait_ms[j, end] - wait_ms[j, low] > limit_ms:
                low += 1
            while last > first and window[first] < low:
                first += 1
            if last > first:
                came_from[j, end] = window[first]
                after[end] = cost[window[first]] + (crossing_ms[end] if end < atoms else 0.0)
        cost, after = after, cost
    if cost[atoms] == np.inf:
        return np.empty(0, np.int64)
    path = np.empty(n + 1, np.int64)
    path[n] = atoms
    for j in range(n - 1, -1, -1):
        path[j] = came_from[j, path[j + 1]]
    return path
