"""Cuts that make stages alike, on arrays alone."""

import numpy as np

from fxpipe.jit import compiled

_FAR = 3.0  # only an atom is so many times as long as the largest stage should be


@compiled
def alike_path(  # type: ignore[no-untyped-def]
    forward_before, backward_before, message_ms, shares, price,
):  # fmt: skip
    """The bounds of as many stages as there are `shares`, each as near to its share as may be.

    A stage's forward and backward should be to those of others as their `shares`. What counts is by
    what part they differ from that, squared, and `price` times the message behind the stage, as a
    part of a forward of share 1. The first and the last stage may be smaller. Costs are by place.
    """
    n_places, n_stages = len(forward_before), len(shares)
    end = n_places - 1
    forward_ms = max(forward_before[end] / shares.sum(), 1e-9)
    backward_ms = max(backward_before[end] / shares.sum(), 1e-9)
    farthest = _FAR * shares.max()
    # Of the best j + 1 stages up to each place: what counts, and where the last of them begins.
    least = np.full((n_places, n_stages), np.inf)
    begins = np.zeros((n_places, n_stages), np.int64)
    for place in range(1, n_places):
        message = price * message_ms[place] / forward_ms if place < end else 0.0
        for begin in range(place - 1, -1, -1):
            forward = (forward_before[place] - forward_before[begin]) / forward_ms
            backward = (backward_before[place] - backward_before[begin]) / backward_ms
            if begin < place - 1 and forward + backward > 2 * farthest:
                break
            for j in range(1 if begin else 0, n_stages if begin else 1):
                before = least[begin, j - 1] if j > 0 else 0.0
                if before >= least[place, j]:  # what is to be added makes it no less
                    continue
                ahead, behind = forward / shares[j] - 1.0, backward / shares[j] - 1.0
                if begin == 0 or place == end:
                    ahead, behind = max(ahead, 0.0), max(behind, 0.0)
                differs = before + ahead * ahead + behind * behind + message
                if differs < least[place, j]:
                    least[place, j] = differs
                    begins[place, j] = begin
    path = np.zeros(n_stages + 1, np.int64)
    path[n_stages] = end
    for j in range(n_stages - 1, 0, -1):
        path[j] = begins[path[j + 1], j]
    return path
