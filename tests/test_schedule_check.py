"""What makes a table one that can run, and what is said of one that can't."""

from textwrap import dedent

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Schedule
from fxpipe.schedule_check import check


def table(text: str) -> Schedule:
    return Schedule.from_csv(dedent(text).strip() + "\n")


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",
        "0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1I0,1F1,1B1,1W0",
    ],
)
def test_a_table_that_can_run_passes(text: str) -> None:
    check(table(text), (0, 1), 2, {})


def test_of_many_broken_rules_the_first_are_told() -> None:
    with pytest.raises(ScheduleError) as error:
        check(table("0F0,0B0"), (0,), 1000, {})

    told = str(error.value).splitlines()
    assert told[1:3] == ["  0F1 is missing", "  0B1 is missing"]
    assert told[20:] == ["  0B10 is missing", "  and 1978 more like that"]


def test_several_stages_of_a_device_stand_in_one_row() -> None:
    check(table("0F0,2F0,2B0,0B0\n1F0,1B0"), (0, 1, 0), 1, {})


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("0F0,0B0\n1F0", ["1B0 is missing"]),
        ("0F0,0B0\n1F0,1I0", ["1W0 is missing, the other half of 1I0"]),
        ("0F0,0B0\n1F0,1W0", ["1I0 is missing, the other half of 1W0"]),
        (
            "0F0,0B0\n1F0,1B0,1I0,1W0",
            ["1B0 is the whole backward, and so are 1I0 and 1W0: write one or the two"],
        ),
        ("0F0,0F0,0B0\n1F0,1B0", ["0F0 stands twice", "row 0: 0F0 [0F0] 0B0"]),
        (
            "0F0,1F0,0B0\n1B0",
            ["1F0 stands on device 0, its stage on 1", "row 0: 0F0 [1F0] 0B0"],
        ),
        (
            "0F0,0B0,2F0\n1F0,1B0,1F1",
            [
                "2F0 on device 0: the plan's stages are 0 to 1, its micro-batches 0 to 0",
                "1F1 on device 1: the plan's stages are 0 to 1, its micro-batches 0 to 0",
                "row 0: 0F0 0B0 [2F0]",
                "row 1: 1F0 1B0 [1F1]",
            ],
        ),
        (
            "0B0,0F0\n1F0,1B0",
            [
                "device 0 waits forever at 0B0 for 0F0, 1B0",
                "device 1 waits forever at 1F0 for 0F0",
                "row 0: [0B0] 0F0",
                "row 1: [1F0] 1B0",
            ],
        ),
        (
            "0F0,0W0,0I0\n1F0,1B0",
            ["device 0 waits forever at 0W0 for 0I0", "row 0: 0F0 [0W0] 0I0"],
        ),
    ],
)
def test_every_broken_rule_is_named_and_its_cell_marked(text: str, broken: list[str]) -> None:
    with pytest.raises(ScheduleError) as error:
        check(table(text), (0, 1), 1, {})

    assert str(error.value).splitlines()[1:] == [f"  {line}" for line in broken]


def test_of_a_long_row_what_is_around_the_wrong_cell_is_shown() -> None:
    row = [f"0F{i}" for i in range(20)] + [f"0B{i}" for i in range(20)]
    row[10] = "0F9"
    with pytest.raises(ScheduleError) as error:
        check(table(",".join(row)), (0,), 20, {})

    assert "row 0: ... 0F4 0F5 0F6 0F7 0F8 0F9 [0F9] 0F11" in str(error.value)
    assert str(error.value).endswith("0F16 ...")


def test_a_stage_that_writes_buffers_runs_its_forwards_by_number() -> None:
    swapped = table("0F1,0F0,0B0,0B1\n1F1,1B1,1F0,1B0")
    check(swapped, (0, 1), 2, {})
    with pytest.raises(ScheduleError) as error:
        check(swapped, (0, 1), 2, {1: "norm.running_mean"})

    assert str(error.value).splitlines()[1:] == [
        "  1F0 comes after 1F1, but stage 1 writes the buffer 'norm.running_mean': its F must come "
        "by number",
        "  row 1: 1F1 1B1 [1F0] 1B0",
    ]
