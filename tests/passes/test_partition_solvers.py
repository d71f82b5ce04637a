"""The solvers against every possible cut of small chains, and against themselves."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chains import between, every_plan, random_chain
from pairs import all_pairs

from fxpipe.ir import Chain, CheckpointMode, Link, Network, Plan
from fxpipe.passes import order
from fxpipe.passes.partition import SOLVERS, partition

ROOMY = 10**12
HERE = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def question(seed: int, *, skips: bool, tight: bool) -> tuple[Chain, dict[str, Any]]:
    """A small chain and what is asked of it."""
    random = Random(seed)
    chain = random_chain(random, random.randint(9, 12), n_skips=2 if skips else 0)
    asked = {
        "n_stages": (n := random.choice([2, 3, 4])),
        "n_microbatches": random.choice([2, 4, 6]),
        "schedule": random.choice(["gpipe", "1f1b"]),
        "checkpoint": random.choice(list(CheckpointMode)),
        "network": Network(Link(0.02, random.choice([1e3, 1e4, 1e5]))),
        "capacity_bytes": (ROOMY,) * n,
    }
    if tight:
        # Between what the shortest step and what the least memory needs, so that memory decides.
        asked["capacity_bytes"] = between(chain, asked)
    return chain, asked


@pytest.mark.parametrize("solver", ["dp", "cpsat"])
@pytest.mark.parametrize("seed", range(25))
def test_plain_chains_are_cut_as_well_as_they_can_be(seed: int, solver: str) -> None:
    chain, asked = question(seed, skips=False, tight=False)

    found = partition(chain, **asked, solver=solver)

    assert found.estimate.step_ms == pytest.approx(every_plan(chain, **asked)[0][0])
    if solver == "cpsat":
        assert found.gap == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("seed", range(25))
def test_with_skips_and_tight_memory_too(seed: int) -> None:
    chain, asked = question(seed, skips=True, tight=True)
    best_ms, _ = every_plan(chain, **asked)[0]

    plans = {solver: partition(chain, **asked, solver=solver) for solver in SOLVERS}

    assert plans["cpsat"].estimate.step_ms == pytest.approx(best_ms)
    assert plans["beam"].estimate.step_ms <= 1.05 * best_ms
    assert plans["dp"].estimate.step_ms <= 1.10 * best_ms
    assert all(max(p.estimate.peak_bytes) <= min(asked["capacity_bytes"]) for p in plans.values())
    # The bound holds for every plan, so for the best.
    assert plans["cpsat"].bound_ms is not None
    assert plans["cpsat"].bound_ms <= best_ms


@pytest.mark.parametrize(
    ("seed", "tight", "schedule"), all_pairs(range(8), [True, False], ["interleaved", "bfs"])
)
def test_with_two_stages_a_device_too(seed: int, tight: bool, schedule: str) -> None:
    chain, asked = question(seed, skips=True, tight=False)
    asked |= {"n_stages": 4, "loops": 2, "schedule": schedule, "capacity_bytes": (ROOMY,) * 2}
    if tight:
        asked["capacity_bytes"] = between(chain, asked)
    best_ms, _ = every_plan(chain, **asked)[0]

    solvers = ["beam", "cpsat"] if tight else SOLVERS
    plans = {solver: partition(chain, **asked, solver=solver) for solver in solvers}

    assert plans["cpsat"].estimate.step_ms <= 1.01 * best_ms
    assert all(plan.estimate.step_ms <= 1.20 * best_ms for plan in plans.values())
    assert all(max(p.estimate.peak_bytes) <= min(asked["capacity_bytes"]) for p in plans.values())
    assert plans["cpsat"].stage_to_device == (0, 1, 0, 1)
    assert plans["cpsat"].bound_ms is not None
    assert plans["cpsat"].bound_ms <= best_ms


@pytest.mark.parametrize("seed", range(12))
def test_where_devices_do_the_sending_too(seed: int) -> None:
    chain, asked = question(seed, skips=True, tight=False)
    asked["network"] = Network(Link(0.02, 1e5, value_ms=0.5, byte_ms=1e-5))
    best_ms, _ = every_plan(chain, **asked)[0]

    plans = {solver: partition(chain, **asked, solver=solver) for solver in SOLVERS}

    assert all(plan.estimate.step_ms <= 1.05 * best_ms for plan in plans.values())
    assert plans["cpsat"].bound_ms is not None
    assert plans["cpsat"].bound_ms <= best_ms


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_with_halved_backwards_too(seed: int, tight: bool) -> None:
    chain, asked = question(seed, skips=True, tight=False)
    asked["schedule"] = order.build("zb-h1", asked["n_stages"], asked["n_microbatches"])
    if tight:
        asked["capacity_bytes"] = between(chain, asked)
    best_ms, _ = every_plan(chain, **asked)[0]

    plans = {solver: partition(chain, **asked, solver=solver) for solver in SOLVERS}
    named = partition(chain, **asked | {"schedule": "zb-h1"}, solver="cpsat")

    assert all(plan.estimate.step_ms <= 1.10 * best_ms for plan in plans.values())
    assert all(max(p.estimate.peak_bytes) <= min(asked["capacity_bytes"]) for p in plans.values())
    assert plans["cpsat"].estimate.step_ms <= 1.01 * best_ms
    assert plans["cpsat"].bound_ms is not None
    assert plans["cpsat"].bound_ms <= best_ms
    # By its name, backwards are whole where that makes no step longer.
    assert named.estimate.step_ms <= 1.01 * best_ms
    assert named.bound_ms is not None
    assert named.bound_ms <= named.estimate.step_ms


@pytest.mark.parametrize("seed", range(10))
def test_without_time_there_is_a_plan_and_a_bound_all_the_same(seed: int) -> None:
    chain, asked = question(seed, skips=True, tight=False)

    found = partition(chain, **asked, solver="cpsat", time_limit_s=0.0)

    assert found.bound_ms is not None
    assert 0 < found.bound_ms <= every_plan(chain, **asked)[0][0]


def summary(found: Plan) -> list[object]:
    return [list(found.cuts), found.estimate.step_ms, found.bound_ms]


def plans_of_one_chain() -> dict[str, list[object]]:
    chain = random_chain(Random(7), 24, n_skips=3)
    asked = question(7, skips=False, tight=False)[1] | {
        "n_stages": 4,
        "n_microbatches": 4,
        "capacity_bytes": (ROOMY,) * 4,
    }
    return {solver: summary(partition(chain, **asked, solver=solver)) for solver in SOLVERS}


def test_plans_are_the_same_in_every_run_and_ortools_loads_only_when_used() -> None:
    code = (
        "import sys, json, test_partition_solvers as t\n"
        "assert 'ortools' not in sys.modules\n"
        "print(json.dumps(t.plans_of_one_chain()))"
    )
    here = plans_of_one_chain()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env={**HERE, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert plans_of_one_chain() == here
    assert json.loads(done.stdout) == here


def test_a_thousand_blocks_in_sixteen_stages_are_as_equal_as_can_be() -> None:
    chain = random_chain(Random(1), 1000)
    found = partition(
        chain,
        n_stages=16,
        n_microbatches=32,
        schedule="1f1b",
        checkpoint=CheckpointMode.NEVER,
        network=Network(Link(0.02, 1e5)),
        capacity_bytes=(ROOMY,) * 16,
        solver="dp",
    )

    # No plan can be shorter than equal stages of this chain without communication.
    work_ms = sum(block.forward_ms + block.backward_ms for block in chain.blocks)
    assert found.estimate.step_ms < 1.02 * (32 + 16 - 1) * work_ms / 16


def test_ctrl_c_still_interrupts_after_cpsat() -> None:
    script = """
import signal
from test_partition_solvers import partition, question
chain, asked = question(0, skips=False, tight=False)
partition(chain, solver="cpsat", **asked)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env=HERE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # also below `make &`
    )
    assert done.stdout == "interrupted\n", done.stderr
