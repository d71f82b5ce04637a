"""A schedule as text and as data, and what makes a table one that can run."""

from textwrap import dedent

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, Kind, Schedule, check, needs


def table(text: str) -> Schedule:
    return Schedule.from_csv(dedent(text).strip() + "\n")


ONE_F_ONE_B = """
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
"""


def test_text_and_data_are_the_same_table() -> None:
    schedule = table(ONE_F_ONE_B)

    assert schedule.rows[1][1] == Action(1, Kind.BACKWARD, 0)
    assert (schedule.n_stages, schedule.n_microbatches) == (2, 2)
    assert Schedule.from_csv(schedule.to_csv()) == schedule


def test_idle_cells_are_skipped() -> None:
    with_idle = table("""
        0F0,0F1,,0B0,0B1
        ,1F0,1B0,1F1,1B1
    """)

    assert with_idle == table(ONE_F_ONE_B)


@pytest.mark.parametrize("cell", ["0X0", "F0", "0F", "0F0 1B0", "-1F0"])
def test_a_cell_that_is_no_action_is_named(cell: str) -> None:
    with pytest.raises(ScheduleError, match=f"'{cell}' is no action"):
        table(f"0F0,{cell}")


@pytest.mark.parametrize(
    ("action", "waits_for"),
    [
        ("0F1", []),
        ("1F1", ["0F1"]),
        ("2B1", ["2F1"]),
        ("1B1", ["1F1", "2B1"]),
    ],
)
def test_what_an_action_waits_for(action: str, waits_for: list[str]) -> None:
    assert [str(one) for one in needs(Action.parse(action), 3)] == waits_for


def test_a_table_that_can_run_passes() -> None:
    check(table(ONE_F_ONE_B), (0, 1), 2)


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("0F0,0B0\n1F0", ["1B0 is missing"]),
        ("0F0,0F0,0B0\n1F0,1B0", ["0F0 stands twice"]),
        ("0F0,1F0,0B0\n1B0", ["1F0 stands on device 0, its stage on 1"]),
        (
            "0F0,0B0,2F0\n1F0,1B0,1F1",
            [
                "2F0 on device 0: the plan has 2 stages and 1 micro-batches",
                "1F1 on device 1: the plan has 2 stages and 1 micro-batches",
            ],
        ),
        (
            "0B0,0F0\n1F0,1B0",
            [
                "device 0 waits forever at 0B0 for 0F0, 1B0",
                "device 1 waits forever at 1F0 for 0F0",
            ],
        ),
    ],
)
def test_every_broken_rule_is_named(text: str, broken: list[str]) -> None:
    with pytest.raises(ScheduleError) as error:
        check(table(text), (0, 1), 1)

    assert str(error.value).splitlines()[1:] == [f"  {line}" for line in broken]
