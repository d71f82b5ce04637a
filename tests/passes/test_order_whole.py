"""Backwards are halved where that shortens the step, and whole elsewhere."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest
from chains import block, plain

from fxpipe.ir import CheckpointMode, Link, Network
from fxpipe.passes import order
from fxpipe.passes.order_whole import whole_where_it_pays
from fxpipe.passes.partition import partition
from fxpipe.passes.simulate import simulate
from fxpipe.passes.simulate_costs import Message, StageCost
from fxpipe.schedule import Schedule

FREE = Network(Link(0.0, float("inf")))
PLENTY = 10**9


def evaluated(cost: StageCost, n: int, m: int):
    return partial(
        simulate,
        stages=[cost] * n,
        messages=[Message(j, j + 1, 0, 0) for j in range(n - 1)],
        network=FREE,
        recompute=[[False] * m] * n,
    )


def test_a_second_half_right_after_the_first_is_one_with_it() -> None:
    halved = Schedule.from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n")
    evaluate = evaluated(StageCost(10.0, 20.0, weight_gradient_ms=10.0), 2, 2)
    found = whole_where_it_pays(halved, evaluate, [PLENTY] * 2)
    assert found.to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1,1W1\n"
    assert evaluate(found).step_ms == evaluate(halved).step_ms


def test_of_zb_h1_on_two_devices_the_first_and_the_last_backward_stay_halved() -> None:
    cost = StageCost(1.0, 2.0, weight_gradient_ms=1.0)
    evaluate = evaluated(cost, 2, 8)
    halved = order.build("zb-h1", 2, 8)
    found = whole_where_it_pays(halved, evaluate, [PLENTY] * 2)
    assert evaluate(found).step_ms == evaluate(halved).step_ms == 25.0
    assert found.split == {(1, 0), (1, 7)}


def test_where_halving_costs_more_than_it_gains_all_are_whole() -> None:
    evaluate = evaluated(StageCost(1.0, 2.0, weight_gradient_ms=1.0, halving_ms=2.0), 2, 8)
    found = whole_where_it_pays(order.build("zb-h1", 2, 8), evaluate, [PLENTY] * 2)
    assert not found.split
    assert evaluate(found).step_ms == evaluate(order.build("1f1b", 2, 8)).step_ms == 27.0


def test_a_table_without_halves_is_as_it_was() -> None:
    table = order.build("1f1b", 2, 4)
    evaluate = evaluated(StageCost(1.0, 2.0), 2, 4)
    assert whole_where_it_pays(table, evaluate, [PLENTY] * 2) is table


def test_a_large_table_takes_no_more_tries_than_a_small_one() -> None:
    evaluate, tried = evaluated(StageCost(1.0, 2.0, weight_gradient_ms=1.0), 16, 64), []

    def counted(schedule: Schedule):
        tried.append(schedule)
        return evaluate(schedule)

    halved = order.build("zb-v", 8, 64, 2)
    found = whole_where_it_pays(halved, counted, [PLENTY] * 8)
    assert len(tried) <= 105
    assert len(found.split) < len(halved.split)


@pytest.mark.parametrize("seed", range(20))
def test_no_step_gets_longer_and_no_device_too_small(seed: int) -> None:
    random = Random(seed)
    p, m = random.choice((2, 3, 4)), random.randint(2, 9)
    name, loops = random.choice((("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)))
    table = order.build(name, p, m, loops)
    n = table.n_stages
    stages = [
        StageCost(
            random.uniform(1, 3),
            random.uniform(3, 6),
            saved_bytes=10,
            weight_gradient_ms=random.uniform(0, 3),
            halving_ms=random.choice((0.0, 0.3)),
            arriving_bytes=random.choice((0, 5)),
            input_workspace_bytes=random.choice((0, 4)),
        )
        for _ in range(n)
    ]
    messages = [Message(j, j + 1, 10, 10) for j in range(n - 1)]
    network = Network(Link(random.choice((0.0, 0.5)), 100.0))

    def evaluate(schedule: Schedule):
        return simulate(schedule, stages, messages, network, [[False] * m] * n)

    before = evaluate(table)
    after = evaluate(whole_where_it_pays(table, evaluate, before.peak_bytes))
    assert after.step_ms <= before.step_ms * (1 + 1e-8)
    assert all(a <= b for a, b in zip(after.peak_bytes, before.peak_bytes, strict=True))


def test_a_named_schedule_halves_where_it_pays_and_a_given_table_stays() -> None:
    chain = plain([block(f"b{k}", 1.0, 2.0, weight_gradient_ms=1.0) for k in range(4)], n_bytes=0)
    table = order.build("zb-h1", 2, 8)
    found = {
        schedule: partition(
            chain,
            n_stages=2,
            n_microbatches=8,
            schedule=schedule,
            checkpoint=CheckpointMode.NEVER,
            network=FREE,
            capacity_bytes=(PLENTY,) * 2,
            solver="dp",
        )
        for schedule in ("zb-h1", table)
    }
    assert found["zb-h1"].schedule.split == {(1, 0), (1, 7)}
    assert found[table].schedule == table
    assert found["zb-h1"].estimate.step_ms == found[table].estimate.step_ms == 50.0


def test_what_halving_and_an_action_cost_is_in_the_step() -> None:
    blocks = [block(f"b{k}", 1.0, 2.0, weight_gradient_ms=1.0, halving_ms=0.25) for k in range(2)]
    chain = replace(plain(blocks, n_bytes=0), action_ms=0.125)
    table = Schedule.from_csv("0F0,0B0\n1F0,1I0,1W0\n")
    plan = partition(
        chain,
        n_stages=2,
        n_microbatches=1,
        schedule=table,
        checkpoint=CheckpointMode.NEVER,
        network=FREE,
        capacity_bytes=(PLENTY,) * 2,
        solver="dp",
    )
    # F, F, I with what halving costs, B; W is done meanwhile.
    assert plan.estimate.step_ms == 1.125 + 1.125 + 1.375 + 2.125
    assert plan.estimate.spans[1][2] == (3.625, 4.75)
