"""Pfeife's family of schedules: its published members, and the tables of others as text."""

from textwrap import dedent

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.passes import order
from fxpipe.passes.order_family import family
from fxpipe.schedule import Action, Schedule
from fxpipe.schedule_check import check


def text(expected: str) -> str:
    return dedent(expected).strip() + "\n"


def forwards_ahead(table: Schedule) -> list[int]:
    """By device, how many forwards come before the first backward."""
    return [next(k for k, action in enumerate(row) if action.kind.sends_back) for row in table.rows]


def test_pipedream_with_flush_and_dapple_a_prefetch_nothing() -> None:
    member = family(4, 8, loops=1, group=8, prefetch=0)
    assert forwards_ahead(member) == [4, 3, 2, 1]
    assert member == order.build("1f1b", 4, 8)


def test_dapple_b_prefetches_what_messages_there_and_back_take() -> None:
    assert forwards_ahead(family(4, 8, loops=1, group=8, prefetch=3)) == [7, 5, 3, 1]


def test_gpipe_and_terapipe_prefetch_all() -> None:
    member = family(4, 6, loops=1, group=6, prefetch=8)
    assert forwards_ahead(member) == [6] * 4
    # Ours lets the last micro-batch go first.
    turned = Schedule(
        tuple(
            (*row[:6], *(Action(a.stage, a.kind, 5 - a.microbatch) for a in row[6:]))
            for row in member.rows
        )
    )
    assert turned == order.build("gpipe", 4, 6)


def test_megatrons_looped_1f1b_takes_as_many_as_devices_through_a_loop() -> None:
    member = family(2, 4, loops=2, group=2, prefetch=1)
    assert member.to_csv() == text("""
        0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3
        1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3
    """)
    assert member == order.build("interleaved", 2, 4, 2)


def test_breadth_first_takes_all_through_a_loop_and_prefetches_all() -> None:
    member = family(2, 2, loops=2, group=2, prefetch=2)
    assert member.to_csv() == text("""
        0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1
        1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1
    """)
    assert member == order.build("bfs", 2, 2, 2)


def test_a_member_between_the_named_ones() -> None:
    assert order.build("pfeife:B_l=3,B_f=1", 2, 3, 2).to_csv() == text("""
        0F0,0F1,0F2,2F0,2F1,2F2,2B0,2B1,2B2,0B0,0B1,0B2
        1F0,1F1,1F2,3F0,3B0,3F1,3B1,3F2,3B2,1B0,1B1,1B2
    """)


@pytest.mark.parametrize(
    ("written", "loops", "group", "prefetch"),
    [
        ("pfeife", 1, 8, 0),
        ("pfeife", 3, 2, 0),
        ("pfeife:B_f=1", 3, 2, 1),
        ("pfeife:B_l=4, B_f=5", 2, 4, 5),
    ],
)
def test_parameters_left_out(written: str, loops: int, group: int, prefetch: int) -> None:
    assert order.build(written, 2, 8, loops) == family(2, 8, loops, group, prefetch)


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 4, 7])
def test_every_member_can_run(p: int, m: int) -> None:
    for loops in (1, 2, 3):
        for group in range(min(p, m) if loops > 1 else 1, m + 1):
            for prefetch in range(m + p):
                table = family(p, m, loops, group, prefetch)
                buffers = dict.fromkeys(range(table.n_stages), "buffer")
                check(table, table.stage_to_device, m, buffers)


@pytest.mark.parametrize("group", [0, 2, 9])
def test_a_group_that_lets_a_device_wait_for_itself_is_refused(group: int) -> None:
    with pytest.raises(ScheduleError, match=rf"B_l={group} micro-batches.* on 4 devices.* 4 to 8"):
        family(4, 8, loops=2, group=group, prefetch=0)


@pytest.mark.parametrize("part", ["B=4", "N_l=2", "B_l=-1", "B_l"])
def test_what_is_no_parameter_is_named(part: str) -> None:
    with pytest.raises(ScheduleError, match=f"'{part}' in schedule 'pfeife:B_f=1,{part}'"):
        order.build(f"pfeife:B_f=1,{part}", 2, 8)


def test_a_colon_with_nothing_behind_it_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"'' in schedule 'pfeife:': .* as in pfeife:B_l=4,"):
        order.build("pfeife:", 2, 8)
