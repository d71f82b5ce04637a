"""The tables of the named schedules, as text."""

from textwrap import dedent

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.passes import order
from fxpipe.schedule import check


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


@pytest.mark.parametrize("name", order.NAMES)
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_every_table_can_run(name: str, n: int, m: int) -> None:
    check(order.build(name, n, m), tuple(range(n)), m)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ScheduleError, match=r"no schedule 'zb': use one of gpipe, 1f1b"):
        order.build("zb", 2, 2)
