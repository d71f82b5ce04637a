"""Orders of actions as chains: told as the simulator tells them, bettered, and kept by moves."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from chains import block, halved_slowly, plain, random_chain

from fxpipe.ir import Chain, Link, Network
from fxpipe.passes.partition_path import even_path
from fxpipe.passes.search.judge import Candidate, Found, Judge, SearchProblem
from fxpipe.passes.search.moves import moved
from fxpipe.passes.search.refine import carried, refined
from fxpipe.passes.search.tables import table_of
from fxpipe.passes.search.tabu_kernel import best_order
from fxpipe.passes.search.tidy import joined
from fxpipe.schedule_check import check

ROOMY = 2**40


def problem(chain: Chain, p: int, m: int, capacity: int = ROOMY, ms: float = 0.01) -> SearchProblem:
    """Links so fast that no message waits for another, but each takes `ms`."""
    edges = (0, *(k + 1 for k, cuttable in enumerate(chain.cuttable[:-1]) if cuttable))
    return SearchProblem(
        chain=chain,
        edges=(*edges, len(chain.blocks)),
        n_devices=p,
        n_microbatches=m,
        network=Network(Link(ms, 1e30)),
        capacity_bytes=(capacity,) * p,
        training_factor=2.0,
        recompute=False,
        loops=(1, 2, 3),
    )


def begun(judge: Judge, random: Random, halved: int | None = None) -> Found:
    """Even stages anywhere, each device with one at least, in the order that devices choose."""
    asked = judge.problem
    p, m = asked.n_devices, asked.n_microbatches
    n = random.randint(p, 3 * p)
    device_of = [*range(p), *(random.randrange(p) for _ in range(n - p))]
    random.shuffle(device_of)
    path = even_path(asked.chain, asked.edges, n)
    halved = random.randint(0, m) if halved is None else halved
    return judge(Candidate(path, tuple(device_of), (0,) * n, halved), (1, p), 2)


def written_by(found: Found) -> dict[int, str]:
    """Every stage writes a buffer, so its forwards must go by number."""
    return dict.fromkeys(range(len(found.candidate.device_of)), "buffer")


def drawn(seed: int) -> tuple[Judge, Found, Random]:
    random = Random(seed)
    chain = halved_slowly(random_chain(random, 24, n_skips=4), random)
    judge = Judge(problem(chain, random.choice([2, 3, 4]), random.choice([2, 5])))
    return judge, begun(judge, random), random


@pytest.mark.parametrize("seed", range(12))
def test_an_order_s_chains_are_as_long_as_its_simulated_step(seed: int) -> None:
    judge, found, _ = drawn(seed)

    assert judge.carried_ms(found.candidate, found.order) == pytest.approx(found.worth[1])


@pytest.mark.parametrize("seed", range(12))
def test_a_better_order_runs_and_takes_what_its_chains_say(seed: int) -> None:
    judge, found, _ = drawn(seed)
    p, m = judge.problem.n_devices, judge.problem.n_microbatches

    ms, order = best_order(found.numbers, found.split, found.order, judge.capacity, 200, seed)
    better = judge.reordered(found.candidate, found.order, 200, seed)

    assert sorted(order.ravel().tolist()) == list(range(order.size))
    assert ms <= found.worth[1] * (1 + 1e-9)
    assert better.worth == (0, pytest.approx(ms))
    check(table_of(better, p), better.candidate.device_of, m, written_by(better))


def test_the_best_order_of_even_stages_is_found() -> None:
    # One stage a device, F = I = W = 10 ms, no communication: 240 ms of work, and the last device
    # begins after 30. From all forwards, then all backwards, then all weights:
    chain = plain([block(name, 10.0, 20.0, weight_gradient_ms=10.0) for name in "abcd"])
    judge = Judge(problem(chain, 4, 8, ms=0.0))
    candidate = Candidate((0, 1, 2, 3, 4), (0, 1, 2, 3), (0,) * 4, 8)
    there = 4.0 * np.arange(8) + np.arange(4)[:, None]
    order = np.stack((there, 32 + there[::-1], 64 + there))

    assert judge.reordered(candidate, order, 0, 0).worth[1] > 300
    assert judge.reordered(candidate, order, 2000, 0).worth == (0, 270.0)


def test_the_order_that_moved_stages_keep_can_run() -> None:
    changed = set()
    for seed in range(12):
        judge, found, random = drawn(seed)
        for _ in range(20):
            candidate = moved(found, judge, random)
            order = carried(found.order, found.candidate, candidate)
            changed.add(len(candidate.device_of) - len(found.candidate.device_of))
            found = judge.reordered(candidate, order, 0, 0)
            table = table_of(found, judge.problem.n_devices)
            check(table, candidate.device_of, judge.problem.n_microbatches, written_by(found))

    assert changed == {-1, 0, 1}


def test_moves_that_keep_the_order_make_a_shorter_step() -> None:
    judge, here, random = drawn(3)
    best = here

    for _ in range(30):
        best = min(best, refined(judge, best, random), key=lambda one: one.worth)

    assert best.worth < here.worth


def test_what_is_too_large_in_the_best_order_is_run_in_the_room_there_is() -> None:
    chain = plain([block(f"b{k}", saved=100, weight_gradient_ms=1.0) for k in range(8)], n_bytes=0)
    free = Judge(problem(chain, 2, 8))
    candidate = Candidate((0, 4, 8), (0, 1), (0, 0), 8)
    all_forwards_first = np.empty((3, 2, 8))
    all_forwards_first[0], all_forwards_first[1], all_forwards_first[2] = (
        [np.arange(8), np.arange(8) + 8],
        [np.arange(8) + 32, np.arange(8) + 24],
        [np.arange(8) + 48, np.arange(8) + 40],
    )
    peak = max(free.reordered(candidate, all_forwards_first, 0, 0).ran[7].tolist())
    assert peak >= 8 * 400

    tight = Judge(problem(chain, 2, 8, capacity=peak // 2))
    found = tight.reordered(candidate, all_forwards_first, 0, 0)

    assert found.worth[0] == 0
    assert max(found.ran[7].tolist()) <= peak // 2


def test_neighbours_on_one_device_are_joined_where_that_costs_nothing() -> None:
    chain = plain([block(f"b{k}", weight_gradient_ms=1.0) for k in range(12)])
    judge = Judge(problem(chain, 2, 4, ms=0.0))
    found = judge(Candidate((0, 3, 6, 7, 9, 12), (0, 0, 1, 1, 1), (0,) * 5, 4), (1, 2), 2)
    better = judge.reordered(found.candidate, found.order, 500, 0)

    one = joined(judge, better)

    devices = one.candidate.device_of
    assert one.worth <= better.worth
    assert len(devices) < 5
    for j, (d, e) in enumerate(pairwise(devices)):  # those that are left give the order more ways
        if d == e:
            path = (*one.candidate.path[: j + 1], *one.candidate.path[j + 2 :])
            fewer = replace(
                one.candidate, path=path, device_of=(*devices[:j], *devices[j + 1 :]),
                prices=one.candidate.prices[1:],
            )  # fmt: skip
            order = carried(one.order, one.candidate, fewer)
            assert judge.carried_ms(fewer, order) >= one.worth[1]
