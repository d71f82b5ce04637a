"""Moves of stages that keep the order of actions: what the search ends with.

Devices that choose by rank find a good order for most stages, but not the best for any. Here the
order stands, whatever stages become, so a move is judged by one pass over its chains; of several
moves the best is made, and its order then bettered by tabu search (tabu_kernel.py).
"""

from dataclasses import replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from fxpipe.passes.search.fit import fitted
from fxpipe.passes.search.judge import Candidate, Found, Judge
from fxpipe.passes.search.moves import moved

_DRAWN = (1, 2, 4, 8)  # moves that one is chosen of
_TRIES = 100  # to better an order after a move
# The same for one whose stages stand, to see what halves do it good, and to begin with.
_NEAR, _SETTLE = 30, 1000
# What it takes to look at a move, in actions simulated: for itself, and for each stage and
# micro-batch.
_LOOK, _LOOK_EACH = 250, 0.5


def settled(judge: Judge, found: Found, random: Random) -> Found:
    """The same stages in the best order near the one found, from here on without a table.

    With so many backwards in halves as does that most good, where it matters how many.
    """
    candidate = replace(found.candidate, table=None)
    if len(judge.halvings) > 1:
        tries = [
            fitted(judge, judge.reordered(one, found.order, _NEAR, random.randrange(2**31)))
            for one in (replace(candidate, halved=halved) for halved in judge.halvings)
        ]
        candidate = min(tries, key=lambda one: one.worth).candidate
    return judge.reordered(candidate, found.order, _SETTLE, random.randrange(2**31))


def refined(judge: Judge, here: Found, random: Random) -> Found:
    """The best of several moves from `here`, in the best order near the one that was."""
    order, best, least = here.order, here.candidate, np.inf
    n_drawn = random.choice(_DRAWN)
    for _ in range(n_drawn):
        candidate = moved(here, judge, random)
        if candidate is here.candidate:
            continue
        step_ms = judge.carried_ms(candidate, carried(order, here.candidate, candidate))
        if step_ms < least:
            best, least = candidate, step_ms
    seed = random.randrange(2**31)
    found = judge.reordered(best, carried(order, here.candidate, best), _TRIES, seed)
    return replace(found, work=found.work + n_drawn * (_LOOK + order[0].size * _LOOK_EACH))


def carried(order: NDArray[np.float64], before: Candidate, after: Candidate) -> NDArray[np.float64]:
    """The order of actions where a stage was cut in two, or joined to the next, if one was."""
    n = len(before.device_of)
    if len(after.device_of) == n:
        return order
    pairs = zip(before.path, after.path, strict=False)
    j = next(k for k, (old, new) in enumerate(pairs) if old != new) - 1
    if len(after.device_of) > n:
        cut = np.insert(order, j, order[:, j], axis=1)
        # The second part runs after the first, and before it on the way back.
        cut[0, j + 1] += 0.2
        cut[1, j] += 0.2
        cut[2, j] += 0.2
        return cut
    joined = np.delete(order, j, axis=1)
    joined[:, j] = np.maximum(order[:, j], order[:, j + 1])
    return joined
