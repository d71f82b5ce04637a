"""What a plan foresees of messages and of memory, and what the clock does."""

from dataclasses import replace

import pytest

from fxpipe.runtime.distributed.foreseen import by_clock, planned
from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.schedule import Action, Schedule

TABLE = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
ESTIMATE = EstimateSpec(
    9.0,
    0.0,
    peak_bytes=(500, 500),
    timeline=(
        "0F0 0.000 1.000, 0F1 1.000 2.000, 0B0 5.000 7.000, 0B1 7.000 9.000",
        "1F0 1.000 2.000, 1B0 2.000 5.000, 1F1 5.000 6.000, 1B1 6.000 7.000",
    ),
    memory=(
        "0.000 100;1.000 200;2.000 150;5.000 300;7.000 120;9.000 50",
        # More comes while 1B0 runs, and as 1F1 begins something goes.
        "0.000 10;1.000 60;2.000 70;4.000 90;5.000 80;7.000 10",
    ),
)


def action(cell: str) -> Action:
    return Action.parse(cell)


def test_what_is_sent_counts_from_when_it_begins_to_be_made() -> None:
    found = planned(ESTIMATE, TABLE)
    assert found is not None
    assert found.comes[action("0F1")] == 1.0
    assert found.ends[action("1F0")] == 2.0


def test_an_action_has_to_spare_what_it_holds_less_than_the_fullest_of_its_rank() -> None:
    found = planned(ESTIMATE, TABLE)
    assert found is not None
    assert found.spare_bytes == [[200, 100, 0, 180], [30, 0, 10, 10]]


@pytest.mark.parametrize(
    "estimate",
    [
        replace(ESTIMATE, timeline=ESTIMATE.timeline[::-1]),
        replace(ESTIMATE, memory=()),
        EstimateSpec(1.0, 0.0, ()),
    ],
    ids=["edited", "unknown memory", "nothing known"],
)
def test_nothing_is_known_of_another_table(estimate: EstimateSpec) -> None:
    assert planned(estimate, TABLE) is None


def test_by_the_clock_it_has_come_in_the_cycle_after_it_was_made() -> None:
    found = by_clock(TABLE)
    assert found.spare_bytes is None
    assert [found.comes[action(cell)] for cell in ("0F0", "0F1", "1F0", "1B0", "0B0")] == [
        0.0, 1.0, 1.0, 2.0, 3.0,
    ]  # fmt: skip
    assert found.ends == found.comes
