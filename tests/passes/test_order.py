"""The tables of the named schedules, as text."""

from textwrap import dedent

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.passes import order
from fxpipe.schedule_check import check


def text(expected: str) -> str:
    return dedent(expected).strip() + "\n"


def test_gpipe_runs_all_forwards_then_all_backwards_from_the_last() -> None:
    assert order.gpipe(2, 3).to_csv() == text("""
        0F0,0F1,0F2,0B2,0B1,0B0
        1F0,1F1,1F2,1B2,1B1,1B0
    """)


def test_1f1b_warms_up_with_one_forward_less_a_stage() -> None:
    assert order.one_f_one_b(3, 4).to_csv() == text("""
        0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3
        1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3
        2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3
    """)


def test_1f1b_with_fewer_microbatches_than_stages() -> None:
    assert order.one_f_one_b(3, 1).to_csv() == text("""
        0F0,0B0
        1F0,1B0
        2F0,2B0
    """)


def test_interleaved_takes_as_many_microbatches_as_devices_through_a_loop_at_a_time() -> None:
    assert order.interleaved(2, 4, 2).to_csv() == text("""
        0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3
        1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3
    """)


def test_zb_h1_computes_weights_gradients_as_many_microbatches_later_as_the_stage_is() -> None:
    assert order.zero_bubble_h1(2, 4).to_csv() == text("""
        0F0,0F1,0I0,0W0,0F2,0I1,0W1,0F3,0I2,0W2,0I3,0W3
        1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3
    """)


def test_interleaved_with_one_loop_is_1f1b() -> None:
    assert order.interleaved(3, 7, 1) == order.one_f_one_b(3, 7)


def test_breadth_first_takes_all_microbatches_through_a_loop_at_a_time() -> None:
    assert order.breadth_first(2, 2, 2).to_csv() == text("""
        0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1
        1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1
    """)


TABLES = [
    (name, p, loops)
    for name in order.NAMES
    for p in (1, 2, 5)
    for loops in ((1, 2, 3) if name in order.LOOPED and p > 1 else (1,))
]


@pytest.mark.parametrize(("name", "p", "loops"), TABLES)
@pytest.mark.parametrize("m", [1, 3, 8])
def test_every_table_can_run(name: str, p: int, m: int, loops: int) -> None:
    check(order.build(name, p, m, loops), tuple(j % p for j in range(p * loops)), m)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ScheduleError, match=r"no schedule 'zb': use one of gpipe, 1f1b, interl"):
        order.build("zb", 2, 2, 1)


@pytest.mark.parametrize(("name", "p"), [("1f1b", 2), ("interleaved", 1)])
def test_several_stages_a_device_are_for_looped_schedules(name: str, p: int) -> None:
    with pytest.raises(ScheduleError, match=f"2 stages a device under {name} on {p} devices"):
        order.build(name, p, 4, 2)
