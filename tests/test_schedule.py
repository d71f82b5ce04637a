"""A schedule as text and as data, and what makes a table one that can run."""

from textwrap import dedent

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, Kind, Schedule, clock_order


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


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n",
        "0F0,0F1,0B0,0B1\n\n1F0,1B0,1F1,1B1\n,,,\n\n",
        " 0F0 ,0F1,0B0,0B1,,\n1F0,1B0,1F1, 1B1\n",
    ],
)
def test_what_editors_and_spreadsheets_add_is_no_part_of_the_table(text: str) -> None:
    assert Schedule.from_csv(text) == table(ONE_F_ONE_B)


def test_a_device_with_nothing_to_do_has_its_line() -> None:
    idle = Schedule(((), *table(ONE_F_ONE_B).rows, ()))
    assert idle.to_csv().splitlines()[-1] == '""'
    assert Schedule.from_csv(idle.to_csv()) == idle


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
        ("0I1", ["0F1", "1B1"]),
        ("0W1", ["0I1"]),
        ("1B0", ["1F0", "2I0"]),
    ],
)
def test_what_an_action_waits_for(action: str, waits_for: list[str]) -> None:
    schedule = table("""
        0F0,0F1,0I0,0I1,0W0,0W1
        1F0,1F1,1B0,1B1
        2F0,2F1,2I0,2W0,2B1
    """)

    assert [str(one) for one in schedule.needs(Action.parse(action))] == waits_for


def test_a_clock_cycle_has_an_action_of_each_device_that_need_not_wait() -> None:
    cycles = [[str(a or "-") for a in cycle] for cycle in table(ONE_F_ONE_B).clock()]

    assert cycles == [
        ["0F0", "-"],
        ["0F1", "1F0"],
        ["-", "1B0"],
        ["0B0", "1F1"],
        ["-", "1B1"],
        ["0B1", "-"],
    ]
    assert [str(a) for a in clock_order(table("0F0,0B0\n1F0"))] == ["0F0", "1F0"]
