"""Partition by beam search over cuts, with Pfeife's moves (Jhoo et al., ICML 2025, section 4).

A move shifts one cut by 1 to 10 places; the other cuts stay, or follow in proportion. Every
candidate is judged by the simulator, so that skips, links and memory count in full.
"""

from bisect import bisect_left
from itertools import accumulate
from random import Random

from fxpipe.passes.partition import Scorer, Solution
from fxpipe.passes.partition_costs import Cuts

_FARTHEST = 10
_WIDTH, _MOVES = 6, 16
# Rounds without a gain before it stops, and simulations in all.
_PATIENCE, _BUDGET = 4, 800

_Path = tuple[int, ...]


def solve(score: Scorer, *, seed: int) -> Solution:
    """The best cuts found within a fixed number of simulations, the same for the same seed."""
    random = Random(seed)
    beam = [_even(score)]
    best = _judge(score, beam[0])
    stale = 0
    while stale < _PATIENCE and len(score.estimates) < _BUDGET:
        paths = {*beam}
        for path in beam:
            paths.update(_moved(path, random) for _ in range(_MOVES))
        beam = sorted(paths, key=lambda path: _judge(score, path))[:_WIDTH]
        found = _judge(score, beam[0])
        stale = 0 if found < best else stale + 1
        best = min(best, found)
    return Solution(best[2])


def _judge(score: Scorer, path: _Path) -> tuple[int, float, Cuts]:
    return score(tuple(score.problem.edges[e] for e in path[1:-1]))


def _even(score: Scorer) -> _Path:
    """Stages of equal time, as far as the edges allow."""
    problem = score.problem
    blocks, edges, n = problem.chain.blocks, problem.edges, problem.n_stages
    before = [0.0, *accumulate(block.forward_ms + block.backward_ms for block in blocks)]
    by_edge = [before[edge] for edge in edges]
    path = [bisect_left(by_edge, by_edge[-1] * j / n) for j in range(n + 1)]
    return _spread(path, len(edges) - 1)


def _moved(path: _Path, random: Random) -> _Path:
    """One random move; the path itself where there is no cut to move."""
    if len(path) == 2:
        return path
    j = random.randrange(1, len(path) - 1)
    to = path[j] + random.choice((-1, 1)) * random.randint(1, _FARTHEST)
    end = path[-1]
    to = min(max(to, j), end - (len(path) - 1 - j))
    moved = [*path]
    moved[j] = to
    if random.random() < 0.5:
        before, after = to / path[j], (end - to) / (end - path[j])
        moved[1:j] = [round(e * before) for e in path[1:j]]
        moved[j + 1 : -1] = [end - round((end - e) * after) for e in path[j + 1 : -1]]
    return _spread(moved, end)


def _spread(path: list[int], end: int) -> _Path:
    """The nearest path upwards, then downwards, with an atom in every stage."""
    n = len(path) - 1
    path = [0, *path[1:-1], end]
    for j in range(1, n):
        path[j] = max(path[j], path[j - 1] + 1)
    for j in range(n - 1, 0, -1):
        path[j] = min(path[j], path[j + 1] - 1)
    return tuple(path)
