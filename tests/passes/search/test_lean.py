"""Of plans whose steps are about as short, one is taken that holds little."""

from dataclasses import replace
from random import Random

import pytest
from chains import random_chain
from searches import problem, searched

from fxpipe.passes.partition_tidy import MOST_LONGER
from fxpipe.passes.search.climbs import Search
from fxpipe.passes.search.judge import SearchProblem
from fxpipe.passes.search.lean import lean_search


def asked(seed: int) -> SearchProblem:
    return problem(random_chain(Random(seed), 24), 2, 8)


def of_a_model(bare: SearchProblem) -> SearchProblem:
    """The same, not of a bare chain: each cut divides one module."""
    return replace(bare, chain=replace(bare.chain, divides=(1,) * len(bare.chain.blocks)))


@pytest.mark.parametrize("seed", range(4))
def test_a_model_is_planned_in_less_memory_for_a_step_that_is_hardly_longer(seed: int) -> None:
    bare = searched(asked(seed))
    run, found = lean_search(
        of_a_model(asked(seed)), seed=0, time_limit_s=20.0, n_workers=2, progress=lambda _: None
    )
    over, step_ms = found.worth
    assert not over
    assert step_ms <= run.best_ms * MOST_LONGER
    assert max(found.peak_bytes) < max(bare.estimate.peak_bytes)


def test_a_bare_chain_is_planned_for_the_shortest_step() -> None:
    run, found = lean_search(
        asked(0), seed=0, time_limit_s=20.0, n_workers=2, progress=lambda _: None
    )
    assert found.worth == (0, pytest.approx(run.best_ms))


def test_a_search_goes_on_from_what_was_found() -> None:
    found = Search(asked(0), seed=0, time_limit_s=20.0, n_workers=2).run()
    hurried = {"seed": 1, "time_limit_s": 0.0}
    assert Search(asked(0), **hurried).run().worth > found.worth
    assert Search(asked(0), **hurried, start=found).run().worth <= found.worth


def test_the_same_seed_gives_the_same_plan() -> None:
    assert searched(of_a_model(asked(1))) == searched(of_a_model(asked(1)))
