"""Of the plans whose steps are about as short, one that holds little.

Many plans lie closer to the shortest step found than predictions are to what is measured, and some
of them hold half of what others do. So once a plan is found, others are, in less and less room.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from fxpipe.passes.partition_tidy import MOST_LONGER
from fxpipe.passes.search.climbs import Search
from fxpipe.passes.search.judge import Found, SearchProblem
from fxpipe.passes.search.tidy import joined, tidied

_AGAIN, _SHARE = 4, 0.1  # how often it is searched again, and for which share of the time


def lean_search(
    problem: SearchProblem,
    *,
    seed: int,
    time_limit_s: float,
    n_workers: int,
    progress: Callable[[float], None],
) -> tuple[Search, Found]:
    """A search for the shortest step, and the leanest plan found whose step is hardly longer.

    Of a bare chain, whose costs are taken as they are told, it is the plan of the shortest step.
    """
    begun = partial(Search, seed=seed, n_workers=n_workers)
    bare = not problem.chain.divides
    share = 1.0 if bare else 1 - _AGAIN * _SHARE
    run = begun(problem, time_limit_s=share * time_limit_s, progress=progress)
    shortest = run.run()
    found = _finished(run, shortest)
    if bare or found.worth[0]:
        return run, found
    longest = 0, shortest.worth[1] * MOST_LONGER
    capacity = np.array(problem.capacity_bytes)
    too_little = (found.at_rest_bytes / capacity).max()
    for _ in range(_AGAIN):
        # The same share of each device's memory, halfway from one that was enough.
        part = (too_little + (found.peak_bytes / capacity).max()) / 2
        room = tuple((part * capacity).astype(np.int64).tolist())
        # What nothing had to compute again stays so, and more is found in the time.
        leaner = replace(problem, capacity_bytes=room, recompute=any(found.candidate.prices))
        share_s = _SHARE * time_limit_s
        again = begun(leaner, time_limit_s=share_s, start=found, bound_ms=run.bound_ms)
        tried = _finished(again, again.run())
        if tried.worth <= longest:
            found = tried
        else:
            too_little = part
    return run, found


def _finished(search: Search, found: Found) -> Found:
    return tidied(search.judge, joined(search.judge, found))
