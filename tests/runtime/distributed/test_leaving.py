"""A rank waits for what it sent to leave where it would hold more of it than the plan counts."""

from random import Random

import pytest
from wirings import wires_of

from fxpipe.passes import order
from fxpipe.runtime.distributed.check_messages import check_messages
from fxpipe.runtime.distributed.foreseen import by_clock
from fxpipe.runtime.distributed.leaving import with_leaves
from fxpipe.runtime.distributed.messages import SENT_AT_ONCE_BYTES, Leave, Post, Receive, Row, Send
from fxpipe.runtime.distributed.routes import rank_rows
from fxpipe.schedule import Action, Schedule

LARGE = SENT_AT_ONCE_BYTES


def leaving(table: Schedule, *skips: tuple[int, int], n_bytes: int = LARGE) -> tuple[Row, ...]:
    """Rows of ranks that ask for nothing ahead."""
    rows = rank_rows(table, wires_of(table.n_stages, *skips), table.stage_to_device, [])
    asking = [
        tuple(one for i in row for one in ([Post(i.message), i] if isinstance(i, Receive) else [i]))
        for row in rows
    ]
    return with_leaves(asking, by_clock(table), lambda message: n_bytes)


def shown(row: Row) -> str:
    """Actions, with `>` where it is waited for what was sent before the last."""
    signs = {Leave: ">"}
    return " ".join(signs.get(type(i), str(i)) for i in row if isinstance(i, Action | Leave))


def test_one_message_may_leave_once_the_one_before_it_has():
    first, last = leaving(order.build("1f1b", 2, 4))
    assert shown(first) == "0F0 0F1 > 0B0 0F2 > 0B1 0F3 > 0B2 0B3"
    assert shown(last) == "1F0 1B0 1F1 1B1 > 1F2 1B2 > 1F3 1B3"


def test_small_messages_are_waited_for_when_they_add_up():
    table = order.build("1f1b", 2, 6)
    first, last = leaving(table, n_bytes=LARGE // 2)
    assert shown(first) == "0F0 0F1 0B0 0F2 > 0B1 0F3 > 0B2 0F4 > 0B3 0F5 > 0B4 0B5"
    assert shown(last) == "1F0 1B0 1F1 1B1 1F2 1B2 > 1F3 1B3 > 1F4 1B4 > 1F5 1B5"
    assert [shown(row) for row in leaving(table, n_bytes=1)] == [*map(shown, table.rows)]


def test_it_is_waited_for_when_the_other_rank_would_ask_for_it_by_the_plan():
    """Rank 3 asks for the value of 0F1 after 3F0, which is no earlier than 0F3."""
    first, *_ = leaving(order.build("gpipe", 4, 6), (0, 3))
    to_last = [item for item in first if not isinstance(item, Leave) or item.message.target == 3]
    assert shown(to_last) == "0F0 0F1 > 0F2 0F3 > 0F4 > 0F5 > 0B5 0B4 0B3 0B2 0B1 0B0"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zb-v"])
@pytest.mark.parametrize("seed", range(3))
def test_no_rank_waits_for_another_for_ever(name, seed):
    random = Random(seed)
    p = random.randint(2, 4)
    table = order.build(name, p, p * random.randint(1, 3), order.usual_loops(name, p))
    far = [(j, k) for j in range(table.n_stages) for k in range(j + 2, table.n_stages)]
    rows = leaving(table, *random.sample(far, min(2, len(far))))
    check_messages(rows)
    for row in rows:
        for target in range(p):
            sent, left = (
                [i.message for i in row if isinstance(i, kind) and i.message.target == target]
                for kind in (Send, Leave)
            )
            assert left == [message for message in sent if message in left]
        assert all(
            row.index(Send(item.message)) < place
            for place, item in enumerate(row)
            if isinstance(item, Leave)
        )
