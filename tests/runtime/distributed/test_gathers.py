"""Where in a rank's row the parameters of its stages are gathered, and that all rows then run."""

import random

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.passes import order
from fxpipe.runtime.distributed.check_messages import check_messages
from fxpipe.runtime.distributed.gathers import with_gathers
from fxpipe.runtime.distributed.messages import (
    Free,
    Gather,
    Gathered,
    Message,
    Receive,
    Reduce,
    Row,
    Send,
    first_of,
)
from fxpipe.runtime.distributed.reductions import reduction_order, with_reductions
from fxpipe.runtime.distributed.routes import rank_rows
from fxpipe.runtime.portal import CALLER, Wire, Wires
from fxpipe.schedule import Action, Schedule


def row_of(text: str) -> tuple[Action, ...]:
    return Schedule.from_csv(text).rows[0]


def test_what_stays_to_the_end_is_gathered_from_the_beginning():
    f00, f20, f01, b20, *rest = row_of("0F0,2F0,0F1,2B0,0B0,2F1,2B1,0B1\n")
    begun = (Gather(0), Gather(2), Gathered(0), f00, Gathered(2), f20, f01, b20, *rest)
    assert with_gathers((f00, f20, f01, b20, *rest)) == begun


def test_a_stage_whose_backwards_are_far_from_its_forwards_is_gathered_twice():
    """Each time while the action before runs."""
    f00, f01, f20, f21, b20, b21, b00, b01 = row_of("0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n")
    waits = Receive(Message("value", None, (0,), 1, 1, 0))
    assert with_gathers((f00, waits, f01, f20, f21, b20, b21, b00, b01)) == (
        *(Gather(0), Gathered(0), f00, Gather(2), waits, f01, Free(0)),
        *(Gathered(2), f20, f21, b20, Gather(0), b21),
        *(Gathered(0), b00, b01),
    )


def test_without_backwards_each_stage_is_let_go_of_after_its_last_action():
    f00, f01, f20, f21 = row_of("0F0,0F1,2F0,2F1\n")
    send = Send(Message("value", None, (1,), 1, 0, 1))
    assert with_gathers((f00, f01, send, f20, f21)) == (
        *(Gather(0), Gathered(0), f00, Gather(2), f01, send, Free(0)),
        *(Gathered(2), f20, f21, Free(2)),
    )


def test_a_wait_for_what_nothing_gathers_is_refused():
    (action,) = row_of("0F0\n")
    check_messages([(Gather(0), Gathered(0), action)])
    with pytest.raises(ScheduleError, match="rank 0 waits forever for the parameters of stage 0"):
        check_messages([(Gathered(0), action, Gather(0))])


def rows_of(table: Schedule, m: int) -> list[Row]:
    n = table.n_stages
    reads = [(Wire(CALLER, "x"),), *((Wire(j, f"x{j}"),) for j in range(n))]
    wires = Wires(tuple(reads), {wire: (j,) for j, (wire,) in enumerate(reads)})
    rows = rank_rows(table, wires, table.stage_to_device, [])
    return [
        first_of(with_reductions(with_gathers(row), reduction_order(whole)), m)
        for row, whole in zip(rows, table.rows, strict=True)
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "bfs", "zb-v", "zb-h1"])
@pytest.mark.parametrize("seed", range(4))
def test_replicas_with_other_numbers_of_micro_batches_run_to_their_ends(name, seed):
    """At random speeds; what they do together they begin in the same order, and have in time."""
    chance = random.Random(seed)
    table = order.build(name, 3, 6, 2 if name in ("interleaved", "bfs", "zb-v") else 1)
    replicas = [rows_of(table, chance.randint(1, 6)) for _ in range(3)]
    left = {
        (d, s): list(reversed(row)) for d, rows in enumerate(replicas) for s, row in enumerate(rows)
    }
    sent: set[object] = set()
    begun: dict[tuple[int, int], list[object]] = {place: [] for place in left}
    there: dict[tuple[int, int], set[int]] = {place: set() for place in left}

    def ready(d: int, s: int) -> bool:
        match left[d, s][-1]:
            case Receive(message):
                return (d, message) in sent
            case Gathered(stage):
                n = begun[d, s].count(Gather(stage))
                return n > 0 and all(begun[k, s].count(Gather(stage)) >= n for k in range(3))
        return True

    while left := {place: row for place, row in left.items() if row}:
        d, s = place = chance.choice([place for place in left if ready(*place)])
        item = left[place].pop()
        match item:
            case Send(message):
                sent.add((d, message))
            case Gathered(stage):
                there[place].add(stage)
            case Free(stage):
                there[place].remove(stage)
            case Action():
                assert item.stage in there[place]
        if isinstance(item, Gather | Reduce):
            begun[place].append(item)
        if isinstance(item, Reduce):
            there[place].remove(item.stage)
    assert not any(there.values())
    for s in range(3):
        assert begun[0, s] == begun[1, s] == begun[2, s]
