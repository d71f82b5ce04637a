"""Rows that can't run are refused."""

import pytest
from wirings import wires_of

from fxpipe.errors import ScheduleError
from fxpipe.runtime.distributed.check_messages import check_messages
from fxpipe.runtime.distributed.routes import rank_rows
from fxpipe.schedule import Schedule


def test_rows_that_wait_for_each_other_are_refused_with_what_each_waits_for():
    table = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    rows = rank_rows(table, wires_of(2), (0, 1), [])
    with pytest.raises(ScheduleError) as caught:
        check_messages(rows)
    assert str(caught.value).splitlines() == [
        "the schedule table can't run:",
        "  rank 0 waits forever for gradient x0 of micro-batch 0 from rank 1 to 0",
        "  rank 1 waits forever for value x0 of micro-batch 1 from rank 0 to 1",
    ]
