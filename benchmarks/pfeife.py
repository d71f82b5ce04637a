"""Pfeife's algorithm 1, slicing and schedule together, as a baseline for this planner.

Source: Jhoo et al., Pfeife (ICML 2025), section 4, and where that is silent its published code
(github.com/MerHS/pfeife, schedule/planner.py). Stages are dealt out to the devices in turn,
backwards are whole, nothing is recomputed. As there:

1. For each number of loops (1 to 3), its parameter sets one after another: B_f from 0 to p - 1
   within each B_l, which is p or a larger divisor of B (B alone under one loop).
2. Cuts begin where stages hold equally many bytes, of parameters and of what they save; the next
   set begins with the best cuts so far.
3. A beam of two: each round moves each cut by 1 to 10 places, the others staying or following in
   proportion, keeps the two best, and ends when neither gets better, or after 100 rounds.
4. A set that betters the best by less than 1% ends its number of loops.

Two things differ, both in its favour: candidates are judged by fxpipe's simulator, in place of a
longest path without contention on links, and those over capacity by their bytes over it, so that
the search finds its way to what fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from judge import Cuts, Judge, Rank, equal

from fxpipe.passes.order_family import family
from fxpipe.schedule import Schedule

FARTHEST, WIDTH, ROUNDS, LEAST_GAIN = 10, 2, 100, 0.01


@dataclass(frozen=True, slots=True)
class Found:
    """A plan. `rank` is bytes over capacity, and the step in ms."""

    rank: Rank
    name: str
    cuts: Cuts
    schedule: Schedule


def algorithm_1(judge: Judge, p: int, m: int, loops: tuple[int, ...] = (1, 2, 3)) -> Found:
    """The best plan of all numbers of loops."""
    best: Found | None = None
    for n_loops in loops:
        if p * n_loops > judge.n_blocks:
            break
        of_loops: Found | None = None
        for group, prefetch in parameter_sets(p, m, n_loops):
            schedule = family(p, m, n_loops, group, prefetch)
            start = of_loops.cuts if of_loops else equal(judge.bytes(), p * n_loops)
            rank, cuts = beam_search(judge, schedule, start)
            before = of_loops.rank if of_loops else None
            if of_loops is None or rank < of_loops.rank:
                name = f"N_l={n_loops} B_l={group} B_f={prefetch}"
                of_loops = Found(rank, name, cuts, schedule)
            if before and not before[0] and 0 < 1 - rank[1] / before[1] < LEAST_GAIN:
                break
        if of_loops and (best is None or of_loops.rank < best.rank):
            best = of_loops
    assert best is not None
    return best


def parameter_sets(p: int, m: int, loops: int) -> Iterator[tuple[int, int]]:
    """(B_l, B_f) in the order in which they are tried."""
    groups = [b for b in range(p, m + 1) if b == p or m % b == 0] if loops > 1 else [m]
    for group in groups:
        for prefetch in range(p):
            yield group, prefetch


def beam_search(judge: Judge, schedule: Schedule, start: Cuts) -> tuple[Rank, Cuts]:
    """The best cuts under `schedule` that moves from `start` lead to."""
    judged = judge.on(schedule)
    ranks = dict(zip([start], judged([start]), strict=True))
    beam, spent = [start], set[Cuts]()
    for _ in range(ROUNDS):
        fresh = [cuts for cuts in beam if cuts not in spent]
        if not fresh:
            break
        spent.update(fresh)
        moved = dict.fromkeys(new for cuts in fresh for new in moves(cuts, judge.n_blocks))
        new = [cuts for cuts in moved if cuts not in ranks]
        ranks.update(zip(new, judged(new), strict=True))
        beam = sorted(ranks, key=lambda cuts: (ranks[cuts], cuts))[:WIDTH]
    return ranks[beam[0]], beam[0]


def moves(cuts: Cuts, n_blocks: int) -> Iterator[Cuts]:
    """Each cut by 1 to 10 places, alone and with the others in proportion."""
    bounds = (0, *cuts, n_blocks)
    for k, cut in enumerate(cuts):
        for to in range(max(1, cut - FARTHEST), min(n_blocks, cut + FARTHEST + 1)):
            if to == cut:
                continue
            if bounds[k] < to < bounds[k + 2]:
                yield (*cuts[:k], to, *cuts[k + 1 :])
            before, after = to / cut, (n_blocks - to) / (n_blocks - cut)
            moved = [round(one * before) for one in cuts[: k + 1]]
            moved += [n_blocks - round((n_blocks - one) * after) for one in cuts[k + 1 :]]
            if all(a < b for a, b in zip((0, *moved), (*moved, n_blocks), strict=True)):
                yield tuple(moved)
