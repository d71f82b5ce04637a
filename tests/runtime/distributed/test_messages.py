"""What is asked of rows of messages."""

from itertools import pairwise

from wirings import wires_of

from fxpipe.runtime.distributed.messages import arrivals
from fxpipe.runtime.distributed.routes import rank_rows
from fxpipe.schedule import Schedule


def test_what_arrives_from_a_rank_is_in_the_order_of_its_row():
    rows = rank_rows(
        Schedule.from_csv("0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1\n"), wires_of(2), (0, 1), []
    )
    assert [m.microbatch for m in arrivals(rows, 1)[0]] == [1, 0]
    assert all(a != b for a, b in pairwise(arrivals(rows, 0)[1]))
