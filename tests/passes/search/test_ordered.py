"""A schedule whose order CP-SAT seeks, for stages that the search found."""

from random import Random

import pytest
from chains import random_chain

from fxpipe.errors import PlanError
from fxpipe.ir import CheckpointMode, Link, Network, Plan
from fxpipe.passes.search import climbs, ordered
from fxpipe.passes.search.plan import search
from fxpipe.schedule_check import check

NETWORK = Network(Link(0.01, 1e5))


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the limit in seconds, a guard that hangs on the machine, is never met."""
    monkeypatch.setattr(climbs, "_WORK_PER_SECOND", 10_000)


def planned(
    seed: int,
    name: str,
    room: int = 2**40,
    recompute: bool = False,
    time_limit_s: float = 10.0,
) -> Plan:
    return search(
        random_chain(Random(seed), 16, n_skips=2),
        n_devices=2,
        n_microbatches=4,
        network=NETWORK,
        capacity_bytes=(room, room),
        training_factor=2.0,
        recompute=recompute,
        loops=(1, 2),
        schedule_name=name,
        time_limit_s=time_limit_s,
    )


@pytest.mark.parametrize(
    ("seed", "share", "recompute"),
    [(0, 0.8, False), (1, 0.8, False), (0, 0.45, True), (1, 0.35, True), (2, 0.45, True)],
)
def test_it_fits_and_is_no_longer_than_what_the_search_found_in_its_half_of_the_time(
    seed: int, share: float, recompute: bool
) -> None:
    room = round(share * max(planned(seed, "auto").estimate.peak_bytes))

    plan = planned(seed, "cpsat", room, recompute)

    found = planned(seed, "auto", room, recompute, time_limit_s=5.0)
    check(plan.schedule, plan.stage_to_device, 4, dict.fromkeys(range(4), "buffer"))
    assert (plan.schedule_name, plan.solver) == ("cpsat", "cpsat")
    assert (plan.cuts, plan.segments) == (found.cuts, found.segments)
    assert plan.checkpoint == found.checkpoint
    assert max(plan.estimate.peak_bytes) <= room
    assert plan.bound_ms is not None
    assert plan.bound_ms <= plan.estimate.step_ms <= found.estimate.step_ms
    again = any(plan.segments) or set(plan.checkpoint) != {CheckpointMode.NEVER}
    assert again == recompute


def test_what_no_order_can_beat_is_told_of_its_stages() -> None:
    plan, found = planned(0, "cpsat"), planned(0, "auto", time_limit_s=5.0)
    assert plan.bound_ms is not None
    assert found.bound_ms is not None
    assert plan.bound_ms > found.bound_ms


def test_there_are_no_more_actions_than_can_be_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "_MOST_ACTIONS", 24)
    assert planned(0, "auto").schedule.n_stages > 2
    assert planned(0, "cpsat").schedule.n_stages == 2

    monkeypatch.setattr(ordered, "_MOST_ACTIONS", 23)
    with pytest.raises(
        PlanError, match=r"24 actions at least, more than CP-SAT orders \(23\): use"
    ):
        planned(0, "cpsat")
