"""The tables of the named schedules, as text."""

from textwrap import dedent

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.ir import Link
from fxpipe.passes import order
from fxpipe.passes.simulate import Simulation, simulate
from fxpipe.passes.simulate_costs import StageCost
from fxpipe.schedule import Schedule
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
    assert order.build("zb-h1", 2, 4).to_csv() == text("""
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


FREE = Link(latency_ms=0.0, bytes_per_ms=1.0)


def simulated(table: Schedule, action_ms: float) -> Simulation:
    """A step whose actions all take equally long, W included; a stage saves one byte."""
    cost = StageCost(action_ms, 2 * action_ms, saved_bytes=1, weight_gradient_ms=action_ms)
    never = [[False] * table.n_microbatches] * table.n_stages
    return simulate(table, [cost] * table.n_stages, [], FREE, never)


def test_zb_h2_sends_twice_as_many_forwards_ahead() -> None:
    assert order.zero_bubble_h2(2, 4).to_csv() == text("""
        0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3
        1F0,1I0,1F1,1I1,1F2,1I2,1W0,1F3,1I3,1W1,1W2,1W3
    """)


def test_zb_v_turns_on_the_last_device_and_ends_on_the_first() -> None:
    assert order.zero_bubble_v(2, 3).to_csv() == text("""
        0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0I1,0W1,0I2,0W2
        1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2
    """)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (5, 9), (8, 16)])
def test_no_device_waits_between_its_first_and_last_action(p: int, m: int) -> None:
    for table in (order.zero_bubble_h2(p, m), order.zero_bubble_v(p, m)):
        for row in simulated(table, 1.0).spans:
            assert row[-1][1] - row[0][0] == len(row)


@pytest.mark.parametrize(("p", "m", "bubble"), [(4, 8, 0.059), (8, 16, 0.068), (8, 32, 0.035)])
def test_zb_v_has_a_sixth_of_the_bubble_of_1f1b_in_its_memory(
    p: int, m: int, bubble: float
) -> None:
    found = simulated(order.zero_bubble_v(p, m), 0.5)
    assert found.step_ms == 3 * m + (p - 1) / 2
    assert round(found.bubble, 3) == bubble
    assert found.peak_bytes == (2 * p,) * p  # of stages half as large


@pytest.mark.parametrize(("p", "m"), [(1, 2), (3, 1), (4, 3), (4, 8), (8, 32)])
def test_memory_is_what_the_docstrings_say(p: int, m: int) -> None:
    flights = {
        "gpipe": [m] * p,
        "1f1b": [min(m, p - d) for d in range(p)],
        "zb-h1": [min(m, p)] * p,
        "zb-h2": [min(m, 2 * p - 1)] * p,
    }
    for name, in_flight in flights.items():
        assert simulated(order.build(name, p, m), 1.0).peak_bytes == tuple(in_flight)
    assert max(simulated(order.zero_bubble_v(p, m), 1.0).peak_bytes) <= 2 * min(p, m)


TABLES = [
    (name, p, loops)
    for name in order.NAMES
    for p in (1, 2, 5)
    for loops in ((2,) if name == "zb-v" else (1, 2, 3) if name in order.LOOPED and p > 1 else (1,))
]


@pytest.mark.parametrize(("name", "p", "loops"), TABLES)
@pytest.mark.parametrize("m", [1, 3, 8])
def test_every_table_can_run(name: str, p: int, m: int, loops: int) -> None:
    table = order.build(name, p, m, loops)
    turn = range(p) if name != "zb-v" else (*range(p), *reversed(range(p)))
    assert table.stage_to_device == tuple(turn) * (loops if name != "zb-v" else 1)
    check(table, table.stage_to_device, m, dict.fromkeys(range(table.n_stages), "buffer"))


@pytest.mark.parametrize("name", ["zb", "1f1b:B_f=1"])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"no schedule '{name}': use one of gpipe, 1f1b, int"):
        order.build(name, 2, 2, 1)


@pytest.mark.parametrize(("name", "p"), [("1f1b", 2), ("interleaved", 1)])
def test_several_stages_a_device_are_for_looped_schedules(name: str, p: int) -> None:
    with pytest.raises(ScheduleError, match=f"2 stages a device under {name} on {p} devices"):
        order.build(name, p, 4, 2)


def test_zb_v_has_two_stages_a_device() -> None:
    assert order.usual_loops("zb-v", 4) == 2
    with pytest.raises(ScheduleError, match="3 stages a device under zb-v: it is made of 2"):
        order.build("zb-v", 4, 8, 3)


OWN = Schedule.from_csv("0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,1B0,1B1\n")


def test_a_table_of_ones_own_says_where_stages_are() -> None:
    assert order.given(OWN, 2, 2, loops=None) is OWN
    assert OWN.stage_to_device == (0, 1, 0)


def test_a_table_of_ones_own_that_does_not_fit_is_told_all_at_once() -> None:
    with pytest.raises(ScheduleError) as error:
        order.given(OWN, 3, 4, loops=2)
    assert str(error.value).splitlines() == [
        "the schedule table doesn't fit:",
        "  rows: 2, devices: 3; write a row for each device",
        "  micro-batches: 2 in it, 4 in a step",
        "  loops: 2 asked for; the rows already say what a device holds",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0B0,0F0\n1F0,1B0\n", "device 0 waits forever at 0B0 for 0F0, 1B0"),
        ("0F0,0B0\n2F0,2B0\n", "1F0 is missing"),
        ("0F0,1F0,0B0\n1B0\n", "1F0 stands on device 0, its stage on 1"),
    ],
)
def test_a_table_of_ones_own_that_can_not_run_is_refused(text: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        order.given(Schedule.from_csv(text), 2, 1, loops=None)
