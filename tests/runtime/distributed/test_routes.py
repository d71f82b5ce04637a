"""What goes between ranks, tried by passing it by hand: no process is started here."""

import random
from collections import defaultdict, deque

import pytest
from wirings import wires_of

from fxpipe.passes import order
from fxpipe.runtime.conductor import Part, parts_in
from fxpipe.runtime.distributed.check_messages import check_messages
from fxpipe.runtime.distributed.messages import Receive, Row, Send, arrivals
from fxpipe.runtime.distributed.routes import rank_rows
from fxpipe.runtime.portal import CALLER, Wires
from fxpipe.schedule import Action, Kind, Schedule, clock_order

HALVED = "0F0,0F1,2F0,2B0,0I0,2F1,0W0,2I1,2W1,0B1\n1F0,1F1,1B0,1I1,1W1\n"


def run(rows: tuple[Row, ...], table: Schedule, wires: Wires, draws: list[int], seed: int) -> None:
    """Run all rows at random speeds; each message must be there when it is needed, and used."""
    n, homes = table.n_stages, (*table.stage_to_device, table.stage_to_device[-1])
    chance = random.Random(seed)
    channels: dict[tuple[int, int], deque[object]] = defaultdict(deque)
    arrived: list[set[object]] = [set() for _ in rows]
    have: list[set[object]] = [set() for _ in rows]
    left = [deque(row) for row in rows]
    while any(left):
        ready = [
            rank
            for rank, row in enumerate(left)
            if row
            and (
                not isinstance(row[0], Receive)
                or row[0].message in (*arrived[rank], *channels[row[0].message.source, rank])
            )
        ]
        rank = chance.choice(ready)  # there is one: nothing waits forever
        item = left[rank].popleft()
        if isinstance(item, Send):
            channels[rank, item.message.target].append(item.message)
        elif isinstance(item, Receive):
            message = item.message
            while message not in arrived[rank]:  # what was sent before comes before
                arrived[rank].add(channels[message.source, rank].popleft())
            have[rank] |= {
                (message.what, message.wire, j, message.microbatch) for j in message.stages
            }
        else:
            do(item, have[rank], rank, wires, homes, draws, n)
    assert not any(channels.values())


def do(
    action: Action,
    have: set[object],
    rank: int,
    wires: Wires,
    homes: tuple[int, ...],
    draws: list[int],
    n: int,
) -> None:
    """Take what the action needs from `have`, leave there what it makes for the rank's own."""
    j, i = action.stage, action.microbatch
    reading = [j, n] if j == n - 1 else [j]
    if action.kind is Kind.FORWARD:
        if any(k < j for k in draws) and j in draws:
            have.remove(("random", None, j, i))
        have |= {("value", w, k, i) for w, ks in wires.readers.items() if w.source == j for k in ks}
        for k in reading:
            for wire in wires.reads[k]:
                if wire.source != CALLER:
                    have.remove(("value", wire, k, i))
                if k == n:
                    have.add(("gradient", wire, n, i))
        following = [k for k in draws if k > j]
        if j in draws and following and homes[following[0]] == rank:
            have.add(("random", None, following[0], i))
    elif action.kind.sends_back:
        for wire, readers in wires.readers.items():
            if wire.source == j:
                for k in readers:
                    have.remove(("gradient", wire, k, i))
        have |= {("gradient", wire, j, i) for wire in wires.reads[j]}


@pytest.mark.parametrize("skips", [[], [(0, 2), (0, 3), (1, 4)]], ids=["chain", "skips"])
@pytest.mark.parametrize("draws", [[], [0, 1, 3]], ids=["", "random"])
@pytest.mark.parametrize("name", order.NAMES)
def test_all_that_is_needed_comes_under_each_named_schedule(name, draws, skips):
    p = 2 if order.usual_loops(name, 4) > 1 else 4
    table = order.build(name, p, 5, order.usual_loops(name, p))
    for m in (5, 3):
        cut = table.first(m)
        wires = wires_of(cut.n_stages, *skips)
        rows = rank_rows(cut, wires, cut.stage_to_device, draws)
        check_messages(rows)
        for seed in range(3):
            run(rows, cut, wires, draws, seed)


def conduct(
    rows: tuple[Row, ...], table: Schedule, wires: Wires, draws: list[int], seed: int
) -> None:
    """Run all rows, and closures on each rank, at random speeds: none waits forever."""
    n, homes = table.n_stages, table.stage_to_device
    chance = random.Random(seed)
    order = clock_order(table)
    sent: list[set[object]] = [set() for _ in rows]  # by target
    have: list[set[object]] = [set() for _ in rows]
    lanes = [deque(row) for row in rows]
    parts = [deque([(Part.PREPARE, 0), *parts_in(order, n)]) for _ in rows]
    trains = any(a.kind is not Kind.FORWARD for a in order)

    def needs(rank: int, item: object) -> set[object]:
        if isinstance(item, Action):
            j, i = item.stage, item.microbatch
            if item.kind is Kind.FORWARD:
                values = {("value", w, j, i) for w in wires.reads[j]}
                return values | ({("random", j, i)} if j in draws else set())
            if item.kind.sends_back:
                own = [(w, ks) for w, ks in wires.readers.items() if w.source == j]
                return {("gradient", w, k, i) for w, ks in own for k in ks}
            return set()
        part, i = item
        if part is Part.FINISH:
            return {("random", n, i), *(("value", w, n, i) for w in wires.reads[n])}
        inputs = [(w, ks) for w, ks in wires.readers.items() if w.source == CALLER]
        made = {("gradient", w, k, i) for w, ks in inputs for k in ks}
        return made if part is Part.UPSTREAM else set()

    def makes(rank: int, item: object) -> set[object]:
        if isinstance(item, Action):
            j, i = item.stage, item.microbatch
            if item.kind is Kind.FORWARD:
                following = next((k for k in draws if k > j), n)
                values = {(w, k) for w, ks in wires.readers.items() if w.source == j for k in ks}
                found = {("value", w, k, i) for w, k in values if k == n or homes[k] == rank}
                if j in draws and (following == n or homes[following] == rank):
                    found.add(("random", following, i))
                return found
            ports = wires.reads[j] if item.kind.sends_back else ()
            return {
                ("gradient", w, j, i)
                for w in ports
                if w.source == CALLER or homes[w.source] == rank
            }
        part, i = item
        if part is Part.PREPARE:
            inputs = {(w, k) for w, ks in wires.readers.items() if w.source == CALLER for k in ks}
            first = draws[0] if draws else n
            return {("random", first, i), *(("value", w, k, i) for w, k in inputs)}
        if part is Part.FINISH and trains:
            return {("gradient", w, n, i) for w in wires.reads[n]}
        return set()

    def ready(rank: int, item: object) -> bool:
        if isinstance(item, Receive):
            return item.message in sent[rank]
        return isinstance(item, Send) or needs(rank, item) <= have[rank]

    while any(lanes) or any(parts):
        able = [
            (rank, queue)
            for queues in (lanes, parts)
            for rank, queue in enumerate(queues)
            if queue and ready(rank, queue[0])
        ]
        rank, queue = chance.choice(able)
        item = queue.popleft()
        if isinstance(item, Send):
            assert item.message not in sent[item.message.target]
            sent[item.message.target].add(item.message)
        elif isinstance(item, Receive):
            m = item.message
            wire = () if m.what == "random" else (m.wire,)
            have[rank] |= {(m.what, *wire, j, m.microbatch) for j in m.stages}
        else:
            have[rank] |= makes(rank, item)


@pytest.mark.parametrize("skips", [[], [(0, 2), (0, 4), (1, 4), (CALLER, 2)]], ids=["", "skips"])
@pytest.mark.parametrize("draws", [[], [0, 1]], ids=["", "random"])
@pytest.mark.parametrize("name", order.NAMES)
def test_closures_on_every_rank_never_wait_forever(name, draws, skips):
    p = 2 if order.usual_loops(name, 4) > 1 else 4
    table = order.build(name, p, 5, order.usual_loops(name, p))
    for cut in (table, table.first(3), table.forwards()):
        wires = wires_of(cut.n_stages, *skips)
        rows = rank_rows(cut, wires, cut.stage_to_device, draws, everywhere=True)
        check_messages(rows)
        for seed in range(3):
            conduct(rows, cut, wires, draws, seed)


def test_a_table_by_hand_of_whole_and_halved_backwards():
    table = Schedule.from_csv(HALVED)
    wires = wires_of(3, (0, 2))
    for seed in range(5):
        run(rank_rows(table, wires, (0, 1, 0), [1, 2]), table, wires, [1, 2], seed)


def test_a_value_goes_once_to_each_rank_and_gradients_come_from_each_reader():
    table = Schedule.from_csv("0F0,0B0\n1F0,2F0,2B0,1B0\n")
    first, second = rank_rows(table, wires_of(3, (0, 2), (0, 3)), (0, 1, 1), [])
    assert [*map(str, (i.message for i in first if isinstance(i, Send)))] == [
        "value x0 of micro-batch 0 from rank 0 to 1"
    ]
    (value,) = arrivals((first, second), 1)[0]
    assert value.stages == (1, 2, 3)
    assert [m.stages for m in arrivals((first, second), 0)[1]] == [(3,), (2,), (1,)]


def test_a_value_for_the_end_alone_comes_before_the_last_stage():
    table = Schedule.from_csv("0F0,0B0\n1F0,1B0\n")
    _, last = rank_rows(table, wires_of(2, (0, 2)), (0, 1), [])
    assert [type(item) for item in last[:2]] == [Receive, Action]


def test_without_backward_no_gradient_is_sent():
    rows = rank_rows(Schedule.from_csv("0F0,0F1\n1F0,1F1\n"), wires_of(2, (0, 2)), (0, 1), [])
    assert {item.message.what for row in rows for item in row if isinstance(item, Send)} == {
        "value"
    }
