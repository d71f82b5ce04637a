"""What a search begins with: as short as it can be made without a move, and soon enough."""

from math import inf

import pytest
from chains import KIB, block, plain
from searches import problem

from fxpipe.passes import order
from fxpipe.passes.search.begin import begun
from fxpipe.passes.search.judge import Candidate, Found, Judge


@pytest.fixture
def judge() -> Judge:
    """64 blocks alike on 4 devices, each with room for what six blocks save of 8 micro-batches."""
    costs = {"saved": 100 * KIB, "weight_gradient_ms": 1.0}
    chain = plain([block(f"b{k}", **costs) for k in range(64)])
    return Judge(problem(chain, 4, 8, 6 * 8 * 100 * KIB, recompute=True))


def test_devices_compute_again_rather_than_wait_for_room(judge: Judge) -> None:
    last = len(judge.prices) - 1
    path = (0, 16, 32, 48, 64)

    found = begun(judge, (0, 1, 2, 3), None, inf)

    waiting = judge(Candidate(path, (0, 1, 2, 3), (0,) * 4, 8), (1, 4, 8), 3)
    always = judge(Candidate(path, (0, 1, 2, 3), (last,) * 4, 8), (1, 4, 8), 3)
    assert found.worth < always.worth < waiting.worth


def test_a_table_begins_with_what_each_device_has_to_compute_again(judge: Judge) -> None:
    table = order.build("1f1b", 4, 8)

    found = begun(judge, table.stage_to_device, table, inf)

    assert found.worth[0] == 0
    assert found.candidate.halved == 0  # as in the table
    first, *_, last = found.candidate.prices
    assert first > last == 0  # fewer micro-batches are in flight there


@pytest.mark.parametrize(("until", "tried"), [(0.0, 1), (inf, 1 + 8 + 4)])
def test_only_one_is_tried_where_the_time_is_over(judge: Judge, until: float, tried: int) -> None:
    asked = []

    class Counting(Judge):
        def __call__(self, candidate: Candidate, *args: object) -> Found:
            asked.append(candidate)
            return super().__call__(candidate, *args)  # type: ignore[arg-type]

    begun(Counting(judge.problem), (0, 1, 2, 3), None, until)

    assert len(asked) == tried
