"""From what the search found to a plan, of a schedule that is given."""

from dataclasses import replace
from math import inf
from random import Random

import pytest
from chains import KIB, block, plain, random_chain
from searches import problem, searched

from fxpipe.errors import PlanError
from fxpipe.ir import CheckpointMode, Plan
from fxpipe.passes import order
from fxpipe.passes.partition import partition
from fxpipe.passes.search.judge import SearchProblem


def by_mode(asked: SearchProblem, name: str, mode: CheckpointMode) -> Plan:
    assert asked.table is not None
    return partition(
        asked.chain,
        n_stages=asked.table.n_stages,
        n_microbatches=asked.n_microbatches,
        schedule=name,
        checkpoint=mode,
        network=asked.network,
        capacity_bytes=asked.capacity_bytes,
        solver="dp",
        loops=asked.table.n_stages // asked.n_devices,
        training_factor=asked.training_factor,
    )


def held_between_halves(capacity: int) -> SearchProblem:
    """Under zb-h1, by blocks whose halved backwards hold four times what they save."""
    one = replace(block("", saved=10 * KIB, weight_gradient_ms=1.0), arriving_bytes=40 * KIB)
    blocks = [replace(one, ops=(f"b{k}",), saved=((f"{k}", 10 * KIB),)) for k in range(8)]
    table = order.build("zb-h1", 2, 4)
    return problem(plain(blocks, KIB), 2, 4, capacity, recompute=True, table=table)


def test_backwards_of_a_named_schedule_are_whole_where_halves_hold_too_much() -> None:
    asked = held_between_halves(70 * KIB)
    plan = searched(asked, time_limit_s=1.0, name="zb-h1")
    assert max(plan.estimate.peak_bytes) <= 70 * KIB
    assert not plan.schedule.split
    assert any(plan.segments)  # no stage is computed again whole
    assert plan.estimate.step_ms < by_mode(asked, "zb-h1", CheckpointMode.ALWAYS).estimate.step_ms


def test_halves_of_a_table_of_ones_own_stay() -> None:
    with pytest.raises(PlanError, match="What would make it fit: `--schedule auto`"):
        searched(held_between_halves(70 * KIB), time_limit_s=0.5)
    roomy = held_between_halves(2**40)
    assert searched(roomy, time_limit_s=0.5).schedule == roomy.table


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
@pytest.mark.parametrize("seed", range(8))
def test_a_schedule_is_no_slower_than_in_a_mode_that_computes_whole_stages_again(
    name: str, seed: int
) -> None:
    chain = random_chain(Random(seed), 24)
    table = order.build(name, 3, 6, order.usual_loops(name, 3))
    asked = problem(chain, 3, 6, recompute=True, table=table)
    peak = max(by_mode(asked, name, CheckpointMode.ALWAYS).estimate.peak_bytes)
    short = replace(asked, capacity_bytes=(peak,) * 3)
    shortest_ms = inf
    for mode in CheckpointMode:
        try:
            shortest_ms = min(shortest_ms, by_mode(short, name, mode).estimate.step_ms)
        except PlanError:
            continue
    assert searched(short, time_limit_s=0.0, name=name).estimate.step_ms <= shortest_ms


def test_each_device_has_a_stage_of_each_loop_or_blocks_are_too_few() -> None:
    blocks = [block(f"b{k}", parameters=KIB) for k in range(5)]
    asked = replace(problem(plain(blocks, KIB), 2, 2), loops=(3,))
    with pytest.raises(PlanError, match="6 stages, but the model has only 5 blocks"):
        searched(asked, time_limit_s=0.0)


def test_devices_that_would_hold_it_are_told_only_where_blocks_suffice_for_them() -> None:
    blocks = [block(f"b{k}", parameters=KIB) for k in range(6)]
    asked = replace(problem(plain(blocks, KIB), 2, 2, KIB), loops=(2,))
    with pytest.raises(PlanError, match="What would make it fit: devices with more memory"):
        searched(asked, time_limit_s=0.0)
