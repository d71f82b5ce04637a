"""Partition by beam search over cuts, with Pfeife's moves (Jhoo et al., ICML 2025, section 4).

A move shifts one cut by 1 to 10 places; the other cuts stay, or follow in proportion. Every
candidate is judged by the simulator, so that skips, links and memory count in full.
"""

from random import Random

from fxpipe.passes.partition import Scorer, Solution
from fxpipe.passes.partition_costs import Cuts
from fxpipe.passes.partition_path import Path, even_path, in_proportion, spread

_FARTHEST = 10
_WIDTH, _MOVES = 6, 16
# Rounds without a gain before it stops, and simulations in all.
_PATIENCE, _BUDGET = 4, 800


def solve(score: Scorer, *, seed: int) -> Solution:
    """The best cuts found within a fixed number of simulations, the same for the same seed."""
    random = Random(seed)
    beam = [even_path(score.problem.chain, score.problem.edges, score.problem.n_stages)]
    best = _judge(score, beam[0])
    stale = 0
    while stale < _PATIENCE and len(score.judged) < _BUDGET:
        paths = {*beam}
        for path in beam:
            paths.update(_moved(path, random) for _ in range(_MOVES))
        beam = sorted(paths, key=lambda path: _judge(score, path))[:_WIDTH]
        found = _judge(score, beam[0])
        stale = 0 if found < best else stale + 1
        best = min(best, found)
    return Solution(best[2])


def _judge(score: Scorer, path: Path) -> tuple[int, float, Cuts]:
    return score(tuple(score.problem.edges[e] for e in path[1:-1]))


def _moved(path: Path, random: Random) -> Path:
    """One random move; the path itself where there is no cut to move."""
    if len(path) == 2:
        return path
    j = random.randrange(1, len(path) - 1)
    to = path[j] + random.choice((-1, 1)) * random.randint(1, _FARTHEST)
    end = path[-1]
    to = min(max(to, j), end - (len(path) - 1 - j))
    moved = in_proportion(path, j, to) if random.random() < 0.5 else [*path[:j], to, *path[j + 1 :]]
    return spread(moved, end)
