"""The simulator: closed formulas, links, memory, and a second implementation."""

import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest
from naive_simulator import naive

from fxpipe.errors import ScheduleError
from fxpipe.ir import Link, Network
from fxpipe.passes import order
from fxpipe.passes.simulate import Simulation, simulate
from fxpipe.passes.simulate_costs import Message, StageCost
from fxpipe.schedule import Action, Kind, Schedule

FREE = Network(Link(latency_ms=0.0, bytes_per_ms=1e30))


def uniform(name: str, n: int, m: int, cost: StageCost, again: bool = False) -> Simulation:
    return simulate(order.build(name, n, m), [cost] * n, [], FREE, [[again] * m] * n)


def timeline(simulation: Simulation, schedule: Schedule) -> list[str]:
    """One line a device, one column a millisecond: the micro-batch in F, a letter in B."""
    lines = []
    for row, spans in zip(schedule.rows, simulation.spans, strict=True):
        line = ["."] * round(simulation.step_ms)
        for action, (start, end) in zip(row, spans, strict=True):
            mark = str(action.microbatch) if action.kind == "F" else "abc"[action.microbatch]
            line[round(start) : round(end)] = mark * round(end - start)
        lines.append("".join(line))
    return lines


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 1), (4, 8), (8, 16), (8, 32)])
def test_bubble_of_equal_stages_is_n_minus_1_over_m_plus_n_minus_1(
    name: str, n: int, m: int
) -> None:
    simulation = uniform(name, n, m, StageCost(forward_ms=1.0, backward_ms=2.0))

    assert simulation.step_ms == pytest.approx((m + n - 1) * 3.0)
    assert simulation.bubble == pytest.approx((n - 1) / (m + n - 1))


@pytest.mark.parametrize(("n", "m"), [(2, 8), (4, 8), (8, 16)])
def test_zb_h1_has_a_third_of_1f1bs_bubble_and_no_more_in_flight(n: int, m: int) -> None:
    cost = StageCost(1.0, 2.0, saved_bytes=1, weight_gradient_ms=1.0)
    halved, whole = uniform("zb-h1", n, m, cost), uniform("1f1b", n, m, cost)

    assert halved.step_ms == pytest.approx(3 * m + n - 1)
    assert whole.step_ms == pytest.approx(3 * m + 3 * (n - 1))
    assert max(halved.peak_bytes) == max(whole.peak_bytes)


def test_recomputed_microbatches_take_the_forward_again() -> None:
    simulation = uniform("1f1b", 2, 4, StageCost(1.0, 2.0), again=True)

    assert simulation.step_ms == pytest.approx((4 + 2 - 1) * 4.0)


def test_1f1b_as_a_picture() -> None:
    schedule = order.one_f_one_b(2, 3)
    simulation = simulate(schedule, [StageCost(1.0, 2.0)] * 2, [], FREE, [[False] * 3] * 2)

    assert timeline(simulation, schedule) == [
        "01..aa2bb.cc",
        ".0aa1bb2cc..",
    ]


def test_a_link_carries_one_message_at_a_time() -> None:
    schedule = order.gpipe(2, 3)
    messages = [Message(0, 1, bytes=30, gradient_bytes=None)]
    simulation = simulate(
        schedule, [StageCost(1.0, 1.0)] * 2, messages, Network(Link(1.0, 10.0)), [[False] * 3] * 2
    )

    # Each message takes 1 + 30 / 10 ms, and the next waits for it: arrivals at 5, 9, 13.
    assert timeline(simulation, schedule) == [
        "012............cba",
        ".....0...1...2cba.",
    ]


def test_what_sending_takes_of_a_device_is_part_of_the_actions_around_it() -> None:
    schedule = order.gpipe(2, 2)
    messages = [Message(0, 1, bytes=4, gradient_bytes=2, values=2, gradients=1)]
    links = Network(Link(1.0, 1e30, value_ms=1.0, byte_ms=0.5))
    simulation = simulate(schedule, [StageCost(1.0, 1.0)] * 2, messages, links, [[False] * 2] * 2)

    # F lasts 1 + 2 x 1 + 4 x 0.5 on both, B 1 + 1 x 1 + 2 x 0.5; messages take 1 besides.
    assert timeline(simulation, schedule) == [
        "0000011111..........bbbaaa",
        "......0000011111bbbaaa....",
    ]


def test_opposite_directions_and_other_pairs_do_not_wait_for_each_other() -> None:
    # A portal from stage 0 to 2 as long as all the rest: its gradient has its own link, too.
    messages = [Message(0, 1, 10, 10), Message(1, 2, 10, 10), Message(0, 2, 10, 10)]
    simulation = simulate(
        order.gpipe(3, 1),
        [StageCost(1.0, 1.0)] * 3,
        messages,
        Network(Link(0.0, 10.0)),
        [[False]] * 3,
    )

    assert simulation.step_ms == pytest.approx(3 * (1 + 1) + 2 * (1 + 1))


def test_a_portal_is_waited_for() -> None:
    messages = [Message(0, 2, bytes=100, gradient_bytes=None)]
    simulation = simulate(
        order.gpipe(3, 1),
        [StageCost(1.0, 1.0)] * 3,
        messages,
        Network(Link(0.0, 10.0)),
        [[False]] * 3,
    )

    assert simulation.spans[2][0] == (11.0, 12.0)


@pytest.mark.parametrize(("n", "m"), [(4, 8), (4, 2), (1, 3)])
def test_microbatches_in_flight(n: int, m: int) -> None:
    cost = StageCost(1.0, 2.0, saved_bytes=1)

    assert uniform("gpipe", n, m, cost).peak_bytes == (m,) * n
    assert uniform("1f1b", n, m, cost).peak_bytes == tuple(min(m, n - j) for j in range(n))


def test_a_device_holds_parameters_gradients_buffers_and_workspace() -> None:
    cost = StageCost(1.0, 1.0, static_bytes=2100, forward_workspace_bytes=10)

    assert uniform("gpipe", 2, 4, cost).peak_bytes == (2110, 2110)


def test_a_stage_with_a_workspace_has_room_for_a_message_while_the_sender_makes_it() -> None:
    """F of the first stage ends at 1 and 2; the second stage's takes from 1 to 11."""
    messages = [Message(0, 1, bytes=100, gradient_bytes=None)]
    for workspace_bytes, peak in ((0, [100, 200]), (10, [110, 210])):
        second = StageCost(10.0, 1.0, backward_workspace_bytes=workspace_bytes)
        simulation = simulate(
            order.build("gpipe", 2, 2),
            (StageCost(1.0, 1.0), second),
            messages,
            Network(Link(0.0, 1e9)),
            [[False] * 2] * 2,
        )
        device_1 = dict(simulation.memory[1])
        assert device_1.get(0.0, 0) == (100 if workspace_bytes else 0)
        assert simulation.peak_bytes[1] == peak[1]


def test_recompute_keeps_only_what_is_received_between_forward_and_backward() -> None:
    cost = StageCost(1.0, 1.0, saved_bytes=100)
    messages = [Message(0, 1, bytes=1, gradient_bytes=None)]
    kept, recomputed = (
        simulate(order.gpipe(2, 4), [cost] * 2, messages, FREE, [[again] * 4] * 2).peak_bytes
        for again in (False, True)
    )

    assert kept == (400, 404)
    assert recomputed == (100, 104)


def test_inputs_count_from_forward_messages_from_the_start_of_their_transfer() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    stages = [StageCost(1.0, 1.0, input_bytes=10), StageCost(9.0, 9.0)]
    messages = [Message(0, 1, bytes=1, gradient_bytes=100)]

    # Stage 1 is slow: the second message waits there while the first micro-batch runs.
    simulation = simulate(schedule, stages, messages, FREE, [[False] * 2] * 2)

    assert simulation.peak_bytes == (120, 2)


def test_what_stays_on_a_device_counts_until_its_gradient_is_used() -> None:
    schedule = Schedule.from_csv("0F0,1F0,0F1,1F1,1B0,1B1,0B0,0B1\n")
    messages = [Message(0, 1, bytes=1, gradient_bytes=1, handed_bytes=10)]

    simulation = simulate(schedule, [StageCost(1.0, 1.0)] * 2, messages, FREE, [[False] * 2] * 2)

    assert simulation.peak_bytes == (20,)
    assert simulation.memory[0][-2:] == ((7.0, 10), (8.0, 0))


def test_a_table_that_can_not_run_is_named() -> None:
    with pytest.raises(ScheduleError, match="device 0 waits forever at 0B0"):
        simulate(Schedule.from_csv("0B0,0F0\n"), [StageCost(1.0, 1.0)], [], FREE, [[False]])


@pytest.mark.parametrize("seed", range(60))
def test_random_tables_against_the_naive_simulator(seed: int) -> None:
    random = Random(seed)
    n, m = random.randint(1, 4), random.randint(1, 4)
    # Whole numbers make times meet, where the order of letting go and taking matters.
    stages = [
        StageCost(
            *(random.randint(2, 5) for _ in range(6)),
            weight_gradient_ms=1,
            again_ms=again,
            again_bytes=2 * again,
            arriving_bytes=random.choice((0, 2)),
            backward_workspace_bytes=random.choice((0, 2, 5)),
            loss_bytes=random.choice((0, 0, 9)),
            passing_bytes=random.choice((0, 1)),
            returned_bytes=random.choice((0, 1)),
            halving_ms=random.choice((0, 1)),
            written_bytes=random.choice((0, 3)),
            input_workspace_bytes=random.choice((2, 4)),
            weight_workspace_bytes=random.choice((1, 3)),
        )
        for again in random.choices((0, 0, 3), k=n)
    ]
    pairs = [(s, t) for s in range(n) for t in range(s + 1, n) if random.random() < 0.7]
    messages = [
        Message(
            *(s, t, random.randint(0, 9), random.choice([None, 0, 5]), random.choice([0, 4])),
            values=random.randint(1, 3),
            gradients=random.randint(1, 2),
        )
        for s, t in pairs
    ]
    links = [
        Link(random.randint(0, 2), random.choice([1, 2, 8]), *random.choice([(0, 0), (1, 2)]))
        for _ in range(2)
    ]
    network = Network(links[0], {(0, 1): links[1]})
    recompute = [[random.random() < 0.4 for _ in range(m)] for _ in range(n)]
    schedule = random_table(random, n, m)

    found = simulate(schedule, stages, messages, network, recompute)

    expected = naive(schedule, stages, messages, network, recompute)
    assert found.spans == expected.spans
    assert found.peak_bytes == expected.peak_bytes
    assert (found.step_ms, found.bubble) == pytest.approx((expected.step_ms, expected.bubble))


def random_table(random: Random, n: int, m: int) -> Schedule:
    """A named schedule, stages dealt to devices at random, in an order that can run."""
    rows = order.build(random.choice(["gpipe", "1f1b"]), n, m).rows
    device_of = [random.randrange(1 + n // 2) for _ in range(n)]
    merged = simulate(Schedule(rows), [StageCost(1.0, 1.0)] * n, [], FREE, [[False] * m] * n)
    timed = [
        (span, action)
        for row, spans in zip(rows, merged.spans, strict=True)
        for action, span in zip(row, spans, strict=True)
    ]
    table = []
    for device in sorted(set(device_of)):
        row: list[Action] = []
        for action in (a for _, a in sorted(timed) if device_of[a.stage] == device):
            halved = action.kind is Kind.BACKWARD and random.random() < 0.4
            row.append(replace(action, kind=Kind.INPUT) if halved else action)
        for action in [a for a in row if a.kind is Kind.INPUT]:
            place = random.randint(row.index(action) + 1, len(row))
            row.insert(place, replace(action, kind=Kind.WEIGHT))
        table.append(tuple(row))
    return Schedule(tuple(table))


def test_the_loop_runs_without_machine_code_too() -> None:
    code = (
        "import sys\n"
        "sys.modules['numba'] = None\n"
        "from fxpipe.ir import Link, Network\n"
        "from fxpipe.passes import order, simulate as s\n"
        "free = Network(Link(0.0, 1e30))\n"
        "stages = [s.StageCost(1.0, 2.0, saved_bytes=1)] * 2\n"
        "found = s.simulate(order.one_f_one_b(2, 3), stages, [], free, [[False] * 3] * 2)\n"
        "print(found.step_ms, found.peak_bytes, *found.critical)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "12.0 (2, 1) 0F0 1F0 1B0 1F1 1B1 1F2 1B2 0B2\n"


def test_memory_is_told_from_what_is_held_at_rest() -> None:
    stages = [StageCost(1.0, 2.0, static_bytes=10 * (j + 1), saved_bytes=5) for j in range(2)]
    simulation = simulate(order.gpipe(2, 1), stages, [], FREE, [[False]] * 2)

    assert [changes[0] for changes in simulation.memory] == [(0.0, 10), (0.0, 20)]
    assert [changes[-1] for changes in simulation.memory] == [(6.0, 10), (4.0, 20)]
