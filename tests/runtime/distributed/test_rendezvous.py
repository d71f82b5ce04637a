"""Processes that start again in a store find each other, and nothing that others have left."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from fxpipe.errors import InputError
from fxpipe.runtime.distributed.rendezvous import apart, meet

SIZE = 3


def start(store, timeout_s=20.0, ranks=range(SIZE)):
    """What each rank gets, the first one last, since it waits for the others."""
    with ThreadPoolExecutor(SIZE) as pool:
        timeout = timedelta(seconds=timeout_s)
        calls = {rank: pool.submit(apart, store, rank, SIZE, timeout) for rank in reversed(ranks)}
        return [calls[rank].result() for rank in ranks]


def test_each_start_has_a_part_of_its_own():
    store = dist.HashStore()
    for attempt in range(3):
        first, *others = start(store)
        for other in others:
            assert not other.check(["address"])
        first.set("address", str(attempt))
        assert [other.get("address") for other in others] == [str(attempt).encode()] * 2


def test_one_that_ended_before_the_others_came_does_not_disturb_the_next_start():
    store = dist.HashStore()
    with pytest.raises(dist.DistError, match="ranks 1, 2 have not come"):
        start(store, 0.1, [0])
    with pytest.raises(dist.DistError):
        start(store, 0.1, [1, 2])
    with pytest.raises(dist.DistError, match="rank 2 has not come"):
        start(store, 1.0, [0, 1])
    first, *others = start(store)
    first.set("address", "here")
    assert [other.get("address") for other in others] == [b"here"] * 2


def test_a_port_that_is_taken_is_told_as_that(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for name, value in started.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=f"rank 0: port {port} is taken"):
            meet(20.0)
