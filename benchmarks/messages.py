"""What messages between two busy processes take of their time, by gloo on one host.

    python benchmarks/messages.py

Two processes of one thread compute and, meanwhile, send each other tensors as ranks do. What a turn
is longer by than one without messages is what sending and receiving took, half of it each end's
part. What it is longer by if each waits at its end for what the other sent in the same turn, not in
the one before, is what waiting took: the message's way, and that no two turns last alike.
`fxpipe/costs/topology.py` has the figures that plans count with.
"""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from common import machine
from torch_pipelining import Peer, Rank

from fxpipe.runtime.distributed.worker import Worker

KILOBYTES = (16, 64, 256, 1024, 4096)
MESSAGES = 4  # of a turn, each way
PRODUCTS, FEW = 30, 6  # of matrices, which a turn computes
TURNS, ROUNDS = 20, 15


class Talking(Rank):
    """A process that computes, and talks to the other."""

    def begin(self) -> None:
        self._matrix = torch.randn(256, 256)
        self._sending = Worker("messages", "the other process", [])

    def turns_ms(
        self, kilobytes: int, messages: int, products: int = PRODUCTS, at_once: bool = False
    ) -> float:
        """Milliseconds of a turn.

        It waits for what the other sent in its turn before, or, `at_once`, in the same turn.
        """
        tensor, other = torch.ones(kilobytes * 256), 1 - self._rank
        posted: list[Any] = []
        dist.barrier()
        start = time.perf_counter()
        for _ in range(TURNS):
            following = [
                dist.irecv(torch.empty_like(tensor), other, tag=0) for _ in range(messages)
            ]
            for _ in range(products):
                torch.nn.functional.gelu(self._matrix @ self._matrix)
            for _ in range(messages):
                self._sending.put(dist.isend(tensor, other, tag=0).wait)
            for work in following if at_once else posted:
                work.wait()
            posted = [] if at_once else following
        for work in posted:
            work.wait()
        return 1e3 * (time.perf_counter() - start) / TURNS


def main() -> None:
    torch.set_num_threads(1)
    peer = Peer(Talking)
    peer.ask("begin")
    times: dict[int, list[float]] = {}
    waiting: list[float] = []
    for _ in range(ROUNDS):
        for kilobytes in (0, *KILOBYTES):
            ms = max(peer.ask("turns_ms", kilobytes, MESSAGES if kilobytes else 0))
            times.setdefault(kilobytes, []).append(ms)
        waiting.append(
            max(peer.ask("turns_ms", KILOBYTES[0], 1, FEW, True))
            - max(peer.ask("turns_ms", KILOBYTES[0], 1, FEW))
        )
    peer.close()
    print(
        f"{machine()}.\nMilliseconds that a message takes which is needed at once: "
        f"{statistics.median(waiting):.3f} in the median, {min(waiting):.3f} at the fastest.\n"
        "Milliseconds that a message takes of each end's time:"
    )
    for kilobytes in KILOBYTES:
        found = [
            statistic(times[kilobytes]) - statistic(times[0])
            for statistic in (statistics.median, min)
        ]
        shown = (f"{ms / (2 * MESSAGES):.3f}" for ms in found)
        print(f"{kilobytes} KiB: " + "{} in the median, {} at the fastest".format(*shown))


if __name__ == "__main__":
    main()
