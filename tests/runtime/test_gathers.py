"""Where in a rank's row the parameters of its stages are gathered, and that all rows then run."""

import random

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.passes import order
from fxpipe.runtime.gathers import with_gathers
from fxpipe.runtime.messages import (
    Free,
    Gather,
    Gathered,
    Message,
    Receive,
    Reduce,
    Row,
    Send,
    check_messages,
    rank_rows,
)
from fxpipe.runtime.portal import CALLER, Wire, Wires
from fxpipe.runtime.reductions import reduction_order, with_reductions
from fxpipe.schedule import Action, Schedule


def row_of(text: str) -> tuple[Action, ...]:
    return Schedule.from_csv(text).rows[0]


def test_parameters_are_on_their_way_while_the_action_before_runs():
    f00, f01, f20, *rest = row = row_of("0F0,0F1,2F0,2B0,0B0,0B1\n")
    waits = Receive(Message("value", None, (0,), 1, 1, 0))
    gathered = with_gathers((f00, waits, f01, f20, *rest), frees=False)
    begun = (Gather(0), Gathered(0), f00, Gather(2), waits, f01, Gathered(2), f20, *rest)
    assert gathered == begun
    assert [item for item in gathered if isinstance(item, Action)] == list(row)


def test_without_backwards_each_stage_is_let_go_of_after_its_last_action():
    f00, f01, f20, f21 = row_of("0F0,0F1,2F0,2F1\n")
    assert with_gathers((f00, f01, f20, f21), frees=True) == (
        *(Gather(0), Gathered(0), f00, Gather(2), f01, Free(0)),
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
    rows = rank_rows(table.first(m), wires, table.stage_to_device, [])
    return [
        with_reductions(with_gathers(row, frees=False), reduction_order(whole))
        for row, whole in zip(rows, table.rows, strict=True)
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "bfs", "zb-v"])
@pytest.mark.parametrize("seed", range(5))
def test_replicas_with_other_numbers_of_micro_batches_run_to_their_ends(name, seed):
    """At random speeds; what they do together each begins in the same order."""
    chance = random.Random(seed)
    table = order.build(name, 3, 6, 2 if name in ("interleaved", "bfs", "zb-v") else 1)
    replicas = [rows_of(table, chance.randint(1, 6)) for _ in range(3)]
    left = {
        (d, s): list(reversed(row)) for d, rows in enumerate(replicas) for s, row in enumerate(rows)
    }
    done: set[object] = set()
    begun: dict[tuple[int, int], list[object]] = {place: [] for place in left}
    while left := {place: row for place, row in left.items() if row}:

        def ready(place: tuple[int, int]) -> bool:
            match left[place][-1]:
                case Receive(message):
                    return (place[0], message) in done
                case Gathered(stage):
                    return all(Gather(stage) in begun[d, place[1]] for d in range(3))
            return True

        place = chance.choice([place for place in left if ready(place)])
        item = left[place].pop()
        if isinstance(item, Send):
            done.add((place[0], item.message))
        elif isinstance(item, Gather | Reduce):
            begun[place].append(item)
    for s in range(3):
        assert begun[0, s] == begun[1, s] == begun[2, s]
        assert len(begun[0, s]) == 2 * sum(home == s for home in table.stage_to_device)
