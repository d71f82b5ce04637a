"""Which blocks of a stage are computed again, and in which segments, against all ways there are."""

from collections.abc import Iterator
from itertools import product
from random import Random

import numpy as np
import pytest

from fxpipe.passes.search.again_kernel import FIRST, KEPT, MORE, mark_again

Marks = tuple[int, ...]


def ways(n_blocks: int) -> Iterator[Marks]:
    """All ways to mark so many blocks: what goes on follows what began."""
    for marks in product((KEPT, FIRST, MORE), repeat=n_blocks):
        if all(mark != MORE or (k > 0 and marks[k - 1]) for k, mark in enumerate(marks)):
            yield marks


def largest_bytes(marks: Marks, saved: list[int]) -> int:
    """What the largest segment saves."""
    sizes = [0]
    for mark, size in zip(marks, saved, strict=True):
        if mark == FIRST:
            sizes.append(0)
        sizes[-1] += size if mark else 0
    return max(sizes)


def cost(
    marks: Marks, price: float, saved: list[int], ms: list[float], crosses: list[int]
) -> float:
    """What they take and keep, but for the largest segment."""
    total = 0.0
    for k, mark in enumerate(marks):
        here = price * (1.5 - k / len(marks))
        total += ms[k] if mark else here * saved[k]
        total += here * crosses[k] if mark == FIRST and k > 0 else 0.0
    return total


@pytest.mark.parametrize("seed", range(40))
def test_of_all_ways_the_cheapest_is_marked_and_smaller_segments_where_they_pay(seed: int) -> None:
    random = Random(seed)
    n, begin = random.randint(1, 7), 2
    saved = [random.choice((0, 3, 10, 40)) for _ in range(n)]
    crosses = [random.choice((1, 2, 8)) for _ in range(n)]
    ms = [random.uniform(0, 5) for _ in range(n)]  # no two ways cost the same
    price, share = random.choice((0.05, 0.2, 1.0)), random.choice((0.0, 0.1, 0.5, 1.0))
    marked = np.full(n + 3, -1, np.int8)

    mark_again(
        begin,
        price,
        share,
        np.array(saved),
        np.cumsum([0.0, 7.0, 7.0, *ms]),
        np.array([9, 9, *crosses]),
        marked,
    )

    expected, least, limit = None, float("inf"), sum(saved)
    while True:
        within = (way for way in ways(n) if largest_bytes(way, saved) <= limit)
        cheapest, way = min((cost(way, price, saved, ms, crosses), way) for way in within)
        total = cheapest + price * share * largest_bytes(way, saved)
        if total >= least:
            break
        expected, least, limit = way, total, largest_bytes(way, saved) // 2
    assert tuple(marked.tolist()) == (-1, -1, *expected, -1)
