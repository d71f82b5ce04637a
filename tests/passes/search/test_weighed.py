"""Named schedules, and modes, in the place of what a search found where memory or time is short."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import pytest
from chains import KIB, random_chain
from searches import problem, searched

from fxpipe.chain_file import load_chain
from fxpipe.ir import CheckpointMode, Link, Network, Plan
from fxpipe.passes import order
from fxpipe.passes.partition import partition
from fxpipe.passes.search import weighed
from fxpipe.passes.search.judge import SearchProblem
from fxpipe.passes.search.weighed import shorter_by_modes, shorter_named
from fxpipe.planned import planned
from fxpipe.planner import chain_question


def asked(seed: int) -> SearchProblem:
    """In as much memory as zb-v takes that has all the memory it wants."""
    roomy = problem(random_chain(Random(seed), 24), 2, 8)
    return replace(roomy, capacity_bytes=(max(zb_v(roomy).estimate.peak_bytes),) * 2)


def zb_v(asked: SearchProblem) -> Plan:
    return partition(
        asked.chain,
        n_stages=4,
        loops=2,
        n_microbatches=asked.n_microbatches,
        schedule="zb-v",
        checkpoint=CheckpointMode.NEVER,
        network=asked.network,
        capacity_bytes=asked.capacity_bytes,
        solver="dp",
        training_factor=asked.training_factor,
    )


def hurried_ms(asked: SearchProblem) -> float:
    """The step of a search that has hardly begun."""
    return searched(asked, time_limit_s=2.0).estimate.step_ms


@pytest.mark.parametrize("seed", [0, 1, 5, 9])
def test_where_memory_is_short_a_search_takes_a_named_schedule_that_is_shorter(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, step_ms = asked(seed), zb_v(asked(seed)).estimate.step_ms
    assert hurried_ms(short) <= step_ms
    monkeypatch.setattr(weighed, "_MOST_ACTIONS", 0)
    assert hurried_ms(short) > step_ms


def test_none_is_given_that_is_longer_or_not_asked_for_or_where_there_is_room() -> None:
    short = asked(0)
    found = shorter_named(short, inf, inf)
    assert found is not None
    assert shorter_named(short, found.estimate.step_ms, inf) is None
    one_stage = shorter_named(replace(short, loops=(1,)), inf, inf)
    assert one_stage is None or len(one_stage.cuts) == 1
    assert shorter_named(replace(short, capacity_bytes=(2**40,) * 2), inf, inf) is None
    assert shorter_named(replace(short, capacity_bytes=(1000,) * 2), inf, inf) is None


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 9])
def test_a_search_that_had_no_time_takes_a_named_schedule_that_is_shorter(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = problem(random_chain(Random(seed), 24), 3, 6, network=Network(Link(0.01, 1e2)))

    def hurried() -> float:
        return searched(slow, time_limit_s=0.0).estimate.step_ms

    shortest = shorter_named(slow, inf, 0.0)
    assert shortest is not None
    assert hurried() <= shortest.estimate.step_ms
    monkeypatch.setattr(weighed, "_MOST_ACTIONS", 0)
    assert hurried() > shortest.estimate.step_ms


def test_where_blocks_may_be_computed_again_whole_stages_are_weighed_too() -> None:
    slow = problem(random_chain(Random(1), 24), 3, 6, network=Network(Link(1.0, 1e2)))
    short = replace(slow, capacity_bytes=(500 * KIB,) * 3)
    assert shorter_named(short, inf, 0.0) is None
    again = replace(short, recompute=True)
    shortest = shorter_named(again, inf, 0.0)
    assert shortest is not None
    assert CheckpointMode.NEVER not in shortest.checkpoint
    assert searched(again, time_limit_s=0.0).estimate.step_ms <= shortest.estimate.step_ms


def test_where_cuts_take_long_no_mode_is_weighed_against_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = order.build("1f1b", 2, 8, 1)
    asked = replace(problem(random_chain(Random(0), 24), 2, 8, recompute=True), table=table)
    found = shorter_by_modes(asked, "1f1b", inf)
    assert found is not None
    longer_ms = found.estimate.step_ms * 2
    assert shorter_by_modes(asked, "1f1b", longer_ms) == found
    monkeypatch.setattr(weighed, "_SOON", 24 * 2 - 1)
    assert shorter_by_modes(asked, "1f1b", longer_ms) is None
    assert shorter_by_modes(asked, "1f1b", inf) == found


def test_beside_a_plan_none_is_cut_that_is_much_longer_or_holds_much_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = replace(asked(0), recompute=True)
    found = shorter_named(short, inf, 0.0)
    assert found is not None
    longer_ms = found.estimate.step_ms * 1.01
    assert shorter_named(short, longer_ms, 0.0) == found
    for name in ("_NEAR", "_MOST_HELD"):
        with monkeypatch.context() as never:
            never.setattr(weighed, name, -1.0)
            assert shorter_named(short, longer_ms, 0.0) is None
            assert shorter_named(short, inf, 0.0) == found


def test_few_blocks_are_searched_under_named_schedules_too(tmp_path: Path) -> None:
    """This chain takes 57.6 ms under zb-v alone, a part of a stage computed again."""
    keys = "forward_ms", "input_gradient_ms", "weight_gradient_ms"
    keys += "saved_bytes", "parameter_bytes", "output_bytes"
    blocks = (
        (5, 8, 0, 9557, 0, 0),
        (9, 3, 0, 5109, 3819, 2673),
        (0, 0, 0, 1659, 3506, 2943),
        (2, 8, 0, 0, 0, 0),
        (1, 0, 4, 0, 903, 0),
        (0, 7, 0, 0, 0, 0),
    )
    skips = (2, 5, 3937), (0, 1, 1418), (4, 5, 351), (3, 4, 2447)
    costs = {
        "blocks": [dict(zip(keys, block, strict=True)) for block in blocks],
        "skips": [dict(zip(("from", "to", "bytes"), skip, strict=True)) for skip in skips],
        "optimizer_bytes_per_parameter_byte": 3,
        "latency_ms": 0.3,
        "bandwidth_gb_s": 300,
    }
    (tmp_path / "chain.json").write_text(json.dumps(costs))
    question = chain_question(load_chain(tmp_path / "chain.json"), 2, 2)
    short = replace(question, capacity_bytes=(51664,) * 2, checkpoint="auto")
    found = planned(short, "auto", None, seed=5, time_limit_s=2.0)
    assert found.estimate.step_ms < 57.7
