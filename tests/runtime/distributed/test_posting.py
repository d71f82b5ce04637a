"""Receives are posted as early as memory allows, small ones several at once."""

from dataclasses import replace
from random import Random

import pytest
from wirings import wires_of

from fxpipe.passes import order
from fxpipe.runtime.distributed.foreseen import Foreseen, by_clock
from fxpipe.runtime.distributed.messages import Free, Message, Post, Receive, Row, arrivals
from fxpipe.runtime.distributed.posting import with_posts
from fxpipe.runtime.distributed.routes import rank_rows
from fxpipe.schedule import Action, Kind, Schedule

SAVED, MESSAGE = 10, 1  # bytes that a stage saves of a micro-batch, and that each message has


def held(row: tuple[Action, ...]) -> list[float]:
    """What is saved during each action, with what was received for it."""
    found, kept = [], 0
    for action in row:
        size = SAVED + MESSAGE * (action.stage > 0)
        kept += size * (action.kind is Kind.FORWARD)
        found.append(float(kept))
        kept -= size * (action.kind in (Kind.BACKWARD, Kind.WEIGHT))
    return found


def posted(
    table: Schedule, *skips: tuple[int, int], n_bytes: int = MESSAGE, ahead_bytes: int = 0
) -> tuple[Row, ...]:
    wires = wires_of(table.n_stages, *skips)
    rows = rank_rows(table, wires, table.stage_to_device, [])
    kept, ahead = [held(row) for row in table.rows], [ahead_bytes] * len(rows)
    return with_posts(rows, by_clock(table), kept, ahead, lambda message: n_bytes)


def shown(row: Row) -> str:
    """Actions, with `+` where a receive is posted and `-` where it is waited for."""
    signs = {Post: "+", Receive: "-"}
    return " ".join(
        signs.get(type(i), str(i)) for i in row if isinstance(i, Action | Post | Receive)
    )


def test_1f1b_has_room_for_one_more_while_a_micro_batch_is_in_flight():
    first, second = posted(order.build("1f1b", 2, 4))
    # A gradient has none during a forward that fills the rank; before the next forward there is.
    assert shown(first) == "0F0 + 0F1 - 0B0 + 0F2 - 0B1 + 0F3 - 0B2 + - 0B3"
    # The next value comes while the one before is in its backward.
    assert shown(second) == "+ + - 1F0 1B0 + - 1F1 1B1 + - 1F2 1B2 - 1F3 1B3"


def test_what_is_set_aside_lets_several_be_posted_at_once_when_few_are_left():
    first, second = posted(order.build("1f1b", 2, 6), ahead_bytes=2)
    assert shown(first) == "0F0 + + + 0F1 - 0B0 0F2 - 0B1 + + 0F3 - 0B2 0F4 - 0B3 + 0F5 - 0B4 - 0B5"
    assert shown(second) == (
        "+ + + + - 1F0 1B0 - 1F1 1B1 - 1F2 + + 1B2 - 1F3 1B3 - 1F4 1B4 - 1F5 1B5"
    )


def test_what_stands_between_an_action_and_its_sends_is_no_place_of_its_own():
    table = Schedule.from_csv("0F0,0F1,2F0,2F1\n1F0,1F1\n")
    last = Action(0, Kind.FORWARD, 1)
    rows = tuple(
        tuple(each for item in row for each in ((item, Free(0)) if item == last else (item,)))
        for row in rank_rows(table, wires_of(3), (0, 1, 0), [])
    )
    kept = [[10.0] * len(row) for row in table.rows]
    first, second = with_posts(rows, by_clock(table), kept, (0, 0), lambda message: MESSAGE)
    assert [item for item in first if not isinstance(item, Post)] == list(rows[0])
    assert shown(first) == "0F0 0F1 + - 2F0 + - 2F1"
    assert shown(second) == "+ - 1F0 + - 1F1"


def test_receives_are_posted_where_the_plan_has_room_to_spare() -> None:
    table = order.build("1f1b", 2, 4)
    rows = rank_rows(table, wires_of(2), table.stage_to_device, [])
    kept = [held(row) for row in table.rows]
    # Nothing has come before it is needed.
    late = Foreseen(
        comes=dict.fromkeys((a for row in table.rows for a in row), 1.0),
        ends=dict.fromkeys((a for row in table.rows for a in row), 0.0),
        spare_bytes=[[MESSAGE] * 8, [0, 0, 0, MESSAGE, 0, 0, 0, 0]],
    )
    first, second = with_posts(rows, late, kept, (0, 0), lambda message: MESSAGE)
    assert shown(first) == "0F0 + 0F1 + - 0B0 0F2 + - 0B1 0F3 + - 0B2 - 0B3"
    # There is room during 1B1 alone.
    assert shown(second) == "+ - 1F0 1B0 + - 1F1 + 1B1 - 1F2 1B2 + - 1F3 1B3"


def test_gpipe_posts_all_values_while_little_is_saved_yet():
    _, second = posted(order.build("gpipe", 2, 3))
    assert shown(second) == "+ + + - 1F0 - 1F1 - 1F2 1B2 1B1 1B0"


@pytest.mark.parametrize("skips", [[], [(0, 2), (0, 3), (1, 4)]], ids=["chain", "skips"])
@pytest.mark.parametrize("name", order.NAMES)
def test_all_are_posted_in_order_before_they_are_waited_for(name, skips):
    p = 2 if order.usual_loops(name, 4) > 1 else 4
    rows = posted(order.build(name, p, 6, order.usual_loops(name, p)), *skips)
    for rank, row in enumerate(rows):
        for source, messages in arrivals(rows, rank).items():
            for kind in (Post, Receive):
                found = [i.message for i in row if type(i) is kind and i.message.source == source]
                assert found == messages
        ready: set[Message] = set()
        for item in row:
            if isinstance(item, Post):
                ready.add(item.message)
            assert not isinstance(item, Receive) or item.message in ready


@pytest.mark.parametrize("name", order.NAMES)
@pytest.mark.parametrize("n_bytes", [1, 7])
@pytest.mark.parametrize("ahead_bytes", [0, 3])
def test_buffers_never_pass_what_the_rank_holds_at_its_fullest(name, n_bytes, ahead_bytes):
    p = 2 if order.usual_loops(name, 4) > 1 else 4
    table = order.build(name, p, 6, order.usual_loops(name, p))
    early = posted(table, n_bytes=n_bytes, ahead_bytes=ahead_bytes)
    # The fullest moment where each message is there from the cycle after it was made.
    cycles = {a: k for k, cycle in enumerate(table.clock()) for a in cycle if a is not None}
    for row, actions in zip(early, table.rows, strict=True):
        most = max(load(row, held(actions), cycles, table, n_bytes, by_clock=True))
        really = max(load(row, held(actions), cycles, table, n_bytes, by_clock=False))
        assert really <= most + ahead_bytes


@pytest.mark.parametrize("name", order.NAMES)
@pytest.mark.parametrize("n_bytes", [1, 7])
@pytest.mark.parametrize("ahead_bytes", [0, 3])
def test_nor_what_the_plan_has_room_for_during_each_action(name, n_bytes, ahead_bytes):
    p = 2 if order.usual_loops(name, 4) > 1 else 4
    table = order.build(name, p, 6, order.usual_loops(name, p))
    rows = rank_rows(table, wires_of(table.n_stages), table.stage_to_device, [])
    random, kept = Random(name), [held(row) for row in table.rows]
    # As the clock has it, but for what computing needs, which leaves less room now and then.
    spare = [[random.choice((0, 0, 5, 20)) for _ in row] for row in table.rows]
    plan = replace(by_clock(table), spare_bytes=spare)
    ahead = [ahead_bytes] * len(rows)
    early = with_posts(rows, plan, kept, ahead, lambda message: n_bytes)
    for row, actions, rooms in zip(early, table.rows, spare, strict=True):
        at_once = sorted(row, key=lambda item: not isinstance(item, Post))
        planned = load(at_once, held(actions), plan.comes, table, n_bytes, by_clock=True)
        really = load(row, held(actions), plan.comes, table, n_bytes, by_clock=False)
        for most, room, has in zip(planned, rooms, really, strict=True):
            assert has <= most + room + ahead_bytes


def load(row, kept, cycles, table, n_bytes, by_clock) -> list[float]:
    """What the rank holds during each action, posted buffers or come messages with it."""
    found = []
    ahead: dict[Message, None] = {}
    for item in row:
        if isinstance(item, Post):
            ahead[item.message] = None
        elif isinstance(item, Receive):
            if item.message.what == "value":
                del ahead[item.message]
        elif isinstance(item, Action):
            counted = [m for m in ahead if not by_clock or cycles[maker(m, table)] < cycles[item]]
            found.append(kept[len(found)] + n_bytes * len(counted))
            for message in [m for m in ahead if m.what == "gradient" and needs(item, m)]:
                del ahead[message]
    return found


def needs(action: Action, message: Message) -> bool:
    sends_back = action.kind.sends_back
    return sends_back and (action.stage, action.microbatch) == (
        message.wire.source,
        message.microbatch,
    )


def maker(message: Message, table: Schedule) -> Action:
    i = message.microbatch
    if message.what == "value":
        return Action(message.wire.source, Kind.FORWARD, i)
    (j,) = message.stages
    if j == table.n_stages:
        return Action(j - 1, Kind.FORWARD, i)
    return Action(j, Kind.INPUT if (j, i) in table.split else Kind.BACKWARD, i)
