"""What the search found made easier to read: fewer stages, and fewer modules that cuts divide."""

from dataclasses import replace

from fxpipe.passes.partition_tidy import MOST_LONGER, REACH
from fxpipe.passes.search.judge import Candidate, Found, Judge
from fxpipe.passes.search.refine import carried
from fxpipe.passes.search.tables import table_of

_TRIES = 30  # to make up for a join by another order


def joined(judge: Judge, found: Found) -> Found:
    """Neighbouring stages on one device made one, where the step gets no longer by it."""
    j = 0
    while judge.problem.table is None and j + 1 < len(found.candidate.device_of):
        candidate = replace(found.candidate, table=None)
        path, device_of, prices = candidate.path, candidate.device_of, candidate.prices
        if device_of[j] == device_of[j + 1]:
            one = Candidate(
                (*path[: j + 1], *path[j + 2 :]),
                (*device_of[:j], *device_of[j + 1 :]),
                (*prices[:j], *prices[j + 1 :]),
                candidate.halved,
            )
            tried = judge.reordered(one, carried(found.order, candidate, one), _TRIES, j)
            if tried.worth <= found.worth:
                found = tried
                continue
        j += 1
    return found


def tidied(judge: Judge, found: Found) -> Found:
    """Cuts moved to where they divide few of the model's modules, if that costs next to nothing."""
    divides, edges = judge.problem.chain.divides, judge.problem.edges
    if not divides:
        return found
    table = found.candidate.table or table_of(found, judge.problem.n_devices)
    best = judge(replace(found.candidate, table=table), (), 0)
    longest_ms = best.worth[1] * MOST_LONGER
    for j in range(1, len(best.candidate.path) - 1):
        path = best.candidate.path
        cut = path[j]
        near = range(max(path[j - 1] + 1, cut - REACH), min(path[j + 1], cut + REACH + 1))
        for place in sorted(near, key=lambda e: (divides[edges[e] - 1], abs(e - cut))):
            if divides[edges[place] - 1] >= divides[edges[cut] - 1]:
                break
            moved = replace(best.candidate, path=(*path[:j], place, *path[j + 1 :]))
            tried = judge(moved, (), 0)
            if tried.worth[0] <= best.worth[0] and tried.worth[1] <= longest_ms:
                best = tried
                break
    return best
