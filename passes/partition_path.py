"""Paths: the places of all stages' bounds among the edges, first and last included."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from fxpipe.ir import Chain

Path = tuple[int, ...]


def even_path(chain: Chain, edges: Sequence[int], n_stages: int) -> Path:
    """Stages of equal time, as far as the edges allow."""
    times = (block.forward_ms + block.backward_ms for block in chain.blocks)
    before = [0.0, *accumulate(times)]
    by_edge = [before[edge] for edge in edges]
    path = [bisect_left(by_edge, by_edge[-1] * (j / n_stages)) for j in range(n_stages + 1)]
    return spread(path, len(edges) - 1)


def in_proportion(path: Path, j: int, to: int) -> list[int]:
    """Bound j moved to `to`, those on either side of it in proportion."""
    end = path[-1]
    before, after = to / path[j], (end - to) / (end - path[j])
    return [
        0,
        *(round(e * before) for e in path[1:j]),
        to,
        *(end - round((end - e) * after) for e in path[j + 1 : -1]),
        end,
    ]


def spread(path: Sequence[int], end: int) -> Path:
    """The nearest path upwards, then downwards, with an atom in every stage."""
    n = len(path) - 1
    spaced = [0, *path[1:-1], end]
    for j in range(1, n):
        spaced[j] = max(spaced[j], spaced[j - 1] + 1)
    for j in range(n - 1, 0, -1):
        spaced[j] = min(spaced[j], spaced[j + 1] - 1)
    return tuple(spaced)
