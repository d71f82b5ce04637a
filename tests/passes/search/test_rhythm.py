"""Rhythms: that each micro-batch does as the one before it, and that devices hold little so."""

from random import Random

import numpy as np
import pytest
from chains import KIB, block, plain, random_chain
from searches import problem

from fxpipe.ir import Link, Network
from fxpipe.passes.partition_path import even_path
from fxpipe.passes.search import rhythm
from fxpipe.passes.search.forms import Forms
from fxpipe.passes.search.judge import Candidate, Found, Judge
from fxpipe.passes.search.rhythm import Rhythm
from fxpipe.passes.search.rhythm_kernel import free_from
from fxpipe.passes.search.tables import table_of

FREE = Network(Link(0.0, 1e30))


def ran(judge: Judge, candidate: Candidate, in_which: Rhythm) -> Found:
    return judge.reordered(candidate, in_which.order(candidate, judge), 0, 0)


def test_each_micro_batch_does_as_the_one_before_it() -> None:
    alike = [block(f"b{k}", 1.0, 2.0, weight_gradient_ms=1.0) for k in range(2)]
    judge = Judge(problem(plain(alike, 0), 2, 4, network=FREE))
    candidate = Candidate((0, 1, 2), (0, 1), (0, 0), 4)

    found = ran(judge, candidate, Rhythm(slack=1.0, pace=1.0, gap=0.0, late=0.0, apart=True))

    rows = [" ".join(map(str, row)) for row in table_of(found, 2).rows]
    assert rows == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3",
        "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2 1F3 1I3 1W3",
    ]


def test_a_device_is_free_between_what_it_does_in_each_period() -> None:
    begins, ends = (
        np.array([0.0, 12.0]),
        np.array([1.0, 14.0]),
    )

    # In each period of 5 ms, it has something to do from 0 to 1 and from 2 to 4.
    assert free_from(0.0, 1.0, begins, ends, 5.0) == pytest.approx(1.0)
    assert free_from(7.5, 1.0, begins, ends, 5.0) == pytest.approx(9.0)
    assert free_from(7.5, 1.5, begins, ends, 5.0) == 7.5  # nowhere
    assert free_from(7.5, 0.0, begins, ends, 5.0) == 7.5


@pytest.mark.parametrize("seed", range(8))
def test_every_rhythm_can_run(seed: int) -> None:
    random = Random(seed)
    judge = Judge(problem(random_chain(random, 24, n_skips=2), 3, 5))
    path = even_path(judge.problem.chain, judge.problem.edges, 5)
    drawn = rhythm.drawn(random)

    for one in (drawn, rhythm.near(drawn, random)):
        found = ran(judge, Candidate(path, (0, 1, 2, 1, 0), (0,) * 5, 5), one)
        assert found.worth[0] == 0
        assert len(found.ran[0]) == 3 * 5 * 5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("device_of", [(0, 1), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_a_chain_that_takes_no_time_has_a_rhythm(device_of: tuple[int, ...], seed: int) -> None:
    judge = Judge(problem(plain([block(f"b{k}", 0.0, 0.0) for k in range(4)]), 2, 3))
    n = len(device_of)
    path = tuple(range(0, 5, 4 // n))

    found = ran(judge, Candidate(path, device_of, (0,) * n, 3), rhythm.drawn(Random(seed)))

    assert found.worth[0] == 0


def test_where_memory_is_short_forms_with_a_rhythm_are_shorter() -> None:
    costs = {"saved": KIB, "weight_gradient_ms": 1.0}
    chain = plain([block(f"b{k}", 1.0, 2.0, **costs) for k in range(32)], 0)
    judge = Judge(problem(chain, 4, 8, 2 * 8 * KIB, network=FREE))  # two micro-batches of eight

    def shortest_ms(*, short: bool) -> float:
        total_ms = 0.0
        for seed in range(4):
            forms = Forms(judge, 0, Random(seed), short=short)
            forms.draw(1e6, is_enough=lambda found: False)
            over, step_ms = min(found.worth for found in forms.best.values())
            assert not over
            total_ms += step_ms
        return total_ms / 4

    assert shortest_ms(short=True) < shortest_ms(short=False)
