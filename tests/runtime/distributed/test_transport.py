"""What is sent is waited for by a thread, to which small messages go several at once."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fxpipe.runtime import stream
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


def test_on_gpus_each_group_is_set_up_before_a_step_uses_any(monkeypatch):
    """As NCCL does that: who first uses a group waits there for the other rank."""
    routes = [(0, 1), (1, 2), (0, 2), (2, 1), (1, 0), (2, 0)]
    meetings = {route: Barrier(2) for route in routes}
    used = []

    def use(_, group, **partner):
        meetings[group.route].wait(timeout=10)
        used.append((group.route, *partner))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "isend", use)
    monkeypatch.setattr(dist, "irecv", use)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda size, device: None)
    monkeypatch.setattr(stream, "synchronize", lambda device: None)

    def set_up(rank):
        def new_group(members):
            if rank in members:
                return SimpleNamespace(route=tuple(members), rank=lambda: members.index(rank))
            return None

        ranks = SimpleNamespace(
            rank=rank, dp=1, size=3, new_group=new_group, together=lambda job: job()
        )
        Transport(ranks, torch.device("cuda", rank), routes)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(set_up, range(3)))
    sent, received = (
        {route for route, partner in used if partner == of} for of in ("group_dst", "group_src")
    )
    assert sent == received == set(routes)
