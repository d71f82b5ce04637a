"""What is sent is waited for by a thread, to which small messages go several at once."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fxpipe.runtime.distributed.messages import SENT_AT_ONCE_BYTES
from fxpipe.runtime.distributed.transport import Transport


class Waiting:
    """Stands for a thread that waits: keeps its jobs."""

    def __init__(self):
        self.jobs = []

    def put(self, job):
        self.jobs.append(job)


@pytest.fixture
def waited(monkeypatch):
    """The messages that were waited for, by their first number."""
    found = []
    monkeypatch.setattr(
        dist,
        "isend",
        lambda tensor, **_: SimpleNamespace(wait=lambda: found.append(int(tensor.flatten()[0]))),
    )
    return found


def transport_to(thread):
    ranks = SimpleNamespace(rank=0, group=None, sending={1: thread}, flush=lambda *_: None)
    return Transport(ranks, torch.device("cpu"), [(0, 1)])


def test_small_messages_are_waited_for_together(waited):
    thread = Waiting()
    transport = transport_to(thread)
    for k in range(5):
        transport.send(torch.full((SENT_AT_ONCE_BYTES // 4,), k, dtype=torch.uint8), 1, 0)
    assert len(thread.jobs) == 1
    transport.finish([1], lambda: None)
    assert len(thread.jobs) == 2
    for job in thread.jobs:
        job()
    assert waited == [0, 1, 2, 3, 4]


def test_a_large_message_is_waited_for_at_once(waited):
    thread = Waiting()
    transport_to(thread).send(torch.zeros(SENT_AT_ONCE_BYTES, dtype=torch.uint8), 1, 0)
    (job,) = thread.jobs
    job()
    assert waited == [0]
