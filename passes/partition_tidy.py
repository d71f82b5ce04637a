"""Cuts moved to where they divide few of the model's modules, if that costs next to nothing.

A module that a cut divides is written out in two stages; one that it spares stays as it was.
"""

from fxpipe.passes.partition import Scorer
from fxpipe.passes.partition_costs import Cuts

MOST_LONGER = 1.01  # of the predicted step, as a factor, that a tidier cut may cost
REACH = 24  # places on either side that are looked at


def tidy(score: Scorer, cuts: Cuts) -> Cuts:
    """`cuts` with each moved in turn; nothing grows over the devices' capacity by it."""
    divides = score.problem.chain.divides
    if not divides:
        return cuts
    over, step_ms, _ = score(cuts)
    for j, cut in enumerate(cuts):
        near = [place for place in score.problem.edges[1:-1] if abs(place - cut) <= REACH]
        for place in sorted(near, key=lambda k: (divides[k - 1], abs(k - cut))):
            if divides[place - 1] >= divides[cut - 1]:
                break
            moved = (*cuts[:j], place, *cuts[j + 1 :])
            if list(moved) == sorted(set(moved)):
                found_over, found_ms, _ = score(moved)
                if found_over <= over and found_ms <= step_ms * MOST_LONGER:
                    cuts = moved
                    break
    return cuts
