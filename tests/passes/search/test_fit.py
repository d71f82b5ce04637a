"""Prices at which a step fits: no device computes again more than its memory makes it."""

from random import Random

import numpy as np
import pytest
from chains import random_chain
from searches import problem

from fxpipe.passes import order
from fxpipe.passes.partition_path import even_path
from fxpipe.passes.search.fit import fitted
from fxpipe.passes.search.judge import Candidate, Found, Judge


@pytest.mark.parametrize("of_table", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_devices_compute_again_as_little_as_their_memory_allows(seed: int, of_table: bool) -> None:
    random = Random(seed)
    chain = random_chain(random, 48, n_skips=2)
    table = order.build("1f1b", 4, 8) if of_table else None
    judge = Judge(problem(chain, 4, 8, recompute=True))
    path, last = even_path(chain, judge.problem.edges, 4), len(judge.prices) - 1

    def found(step: int) -> Found:
        return judge(Candidate(path, (0, 1, 2, 3), (step,) * 4, 8, table), (1,), 1)

    fullest = found(0).peak_bytes
    # The last devices hold too few micro-batches for it to help.
    share = [random.uniform(0.75, 1.0), random.uniform(0.75, 1.0), 1.01, 1.01]
    room = tuple(int(fullest[d] * share[d]) for d in range(4))
    judge.capacity = np.array(room)
    for begun, reach in ((found(last), last), (found(last // 3), 1)):
        fit = fitted(judge, begun, reach)
        again = fitted(judge, fit)

        assert fit.worth[0] == 0
        assert fit.worth <= begun.worth
        assert again.candidate.prices == fit.candidate.prices
        for d, price in enumerate(fit.candidate.prices):
            if price:
                fewer = (p - (j == d) for j, p in enumerate(fit.candidate.prices))
                assert judge.at_prices(fit, tuple(fewer)).peak_bytes[d] > room[d]


def test_where_nothing_is_computed_again_nothing_is_tried() -> None:
    chain = random_chain(Random(0), 24)
    judge = Judge(problem(chain, 2, 4, capacity=1))
    path = even_path(chain, judge.problem.edges, 2)

    found = judge(Candidate(path, (0, 1), (0, 0), 4), (1,), 1)

    assert found.worth[0] > 0
    assert fitted(judge, found) is found
