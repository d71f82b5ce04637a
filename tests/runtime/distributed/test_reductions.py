"""Where in a rank's row the gradients of its stages are summed over replicas."""

import pytest

from fxpipe.passes import order
from fxpipe.runtime.distributed.messages import Message, Reduce, Send
from fxpipe.runtime.distributed.reductions import reduction_order, with_reductions
from fxpipe.schedule import Action, Schedule


def row_of(text: str) -> tuple[Action, ...]:
    return Schedule.from_csv(text).rows[0]


def test_a_stage_is_reduced_once_its_last_weight_gradient_is_there():
    row = row_of("1F0,0F0,1F1,0F1,1I0,1I1,0B0,1W0,1W1,0B1\n")
    assert reduction_order(row) == [1, 0]
    reduced = with_reductions(row, [1, 0])
    assert reduced == (*row[:9], Reduce(1), row[9], Reduce(0))


def test_what_other_ranks_wait_for_is_sent_before():
    (action,) = row_of("0B0\n")
    send = Send(Message("gradient", None, (0,), 0, 0, 1))
    assert with_reductions((action, send), [0]) == (action, send, Reduce(0))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "bfs", "zb-h1"])
@pytest.mark.parametrize("m", range(1, 8))
def test_fewer_micro_batches_reduce_in_the_same_order(name, m):
    table = order.build(name, 2, 8, 2 if name in ("interleaved", "bfs") else 1)
    for whole, row in zip(table.rows, table.first(m).rows, strict=True):
        reduced = with_reductions(row, reduction_order(whole))
        assert [r.stage for r in reduced if isinstance(r, Reduce)] == reduction_order(whole)
        for place, item in enumerate(reduced):
            if isinstance(item, Reduce):
                later = [a for a in reduced[place:] if isinstance(a, Action)]
                assert all(a.stage != item.stage for a in later)


def test_an_order_that_fewer_micro_batches_change_is_kept():
    whole = row_of("0F0,1F0,0F1,1F1,0B0,1B1,1B0,0B1\n")
    assert reduction_order(whole) == [1, 0]
    row = row_of("0F0,1F0,1B0,0B0\n")[:2] + row_of("0B0,1B0\n")
    assert with_reductions(row, [1, 0]) == (*row, Reduce(1), Reduce(0))
