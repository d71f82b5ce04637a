"""What a rank tells of its failure reaches the others, whatever the error says."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from fxpipe.errors import StageError
from fxpipe.runtime.distributed.board import Board
from fxpipe.runtime.distributed.failures import Failures
from fxpipe.runtime.distributed.progress import Progress

WHERE = "stage 2 failed in 2F1, stage_2.py, line 9: `return self.last(g)`: ValueError: a bad row"


def heard(error):
    """What rank 0 hears of the error with which rank 1 has failed."""
    timeout = timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
    boards = [Board(store, rank, 2, lambda: "is in step 1") for rank in range(2)]
    first, second = (Failures(board, Progress(), []) for board in boards)
    failing = threading.Thread(target=second.fail, args=(error,))
    failing.start()
    try:
        for _ in range(100):
            try:
                first.look()
            except StageError as told:
                return str(told)
            time.sleep(0.1)
        return "nothing"
    finally:
        failing.join()
        for board in boards:
            board.close()


@pytest.mark.parametrize("rest", ["", " \udc80", " " + "x" * 30_000_000], ids=["", "lone", "long"])
def test_others_are_told_where_it_failed_and_how_the_error_begins(rest):
    told = heard(StageError(WHERE + rest))
    assert told.startswith(f"rank 1 failed: {WHERE}")
    assert len(told) < 10_000


def test_notes_of_a_long_error_are_told_too():
    error = ValueError("a bad row" * 10_000)
    error.add_note("in micro-batch 3")
    told = heard(error)
    assert told.startswith("rank 1 failed: ValueError: a bad row")
    assert told.endswith("... and 85916 more characters (in micro-batch 3)")
