"""What is measured of the machine rather than of the model: the links between devices."""

import queue
import statistics
import threading
import time
from collections.abc import Sequence
from itertools import combinations

import torch

from fxpipe.ir import Link, Network
from fxpipe.runtime.stream import Device, new_stream, place, synchronize, use_streams

_SMALL_BYTES = 4 * 1024
_LARGE_BYTES = 64 * 1024**2
_REPEATS = 5
_HAND_OVERS = 100


def measure_network(devices: Sequence[Device]) -> Network:
    """Latency and bandwidth between each two devices, both ways at once, as a pipeline uses them.

    Lanes of one place hand a tensor over without copying it: what remains is to wake a thread,
    which is the same for any two. Any pair beyond those measured has the slowest of their links.
    """
    hand_over = Link(latency_ms=_hand_over_ms(), bytes_per_ms=float("inf"))
    pairs: dict[tuple[int, int], Link] = {}
    for a, b in combinations(range(len(devices)), 2):
        if place(devices[a]) != place(devices[b]):
            pairs[a, b] = pairs[b, a] = _copies(devices[a], devices[b])
        elif len({place(device) for device in devices}) > 1:
            pairs[a, b] = pairs[b, a] = hand_over
    slowest = max(
        pairs.values(), key=lambda link: link.transfer_ms(_LARGE_BYTES), default=hand_over
    )
    return Network(slowest, pairs)


def _copies(a: Device, b: Device) -> Link:
    """The link of two devices by messages that are small and large."""
    small, large = (_exchange_ms(a, b, n_bytes) for n_bytes in (_SMALL_BYTES, _LARGE_BYTES))
    spent_ms = max(large - small, 1e-6)  # noise can't make it negative
    bytes_per_ms = (_LARGE_BYTES - _SMALL_BYTES) / spent_ms
    return Link(max(0.0, small - _SMALL_BYTES / bytes_per_ms), bytes_per_ms)


def _exchange_ms(a: Device, b: Device, n_bytes: int) -> float:
    """Milliseconds of a message each way, under way at the same time."""
    sides = [(a, place(b)), (b, place(a))]
    messages = [
        (torch.empty(n_bytes, dtype=torch.uint8, device=place(source)), new_stream(source), target)
        for source, target in sides
    ]
    times = []
    for _ in range(_REPEATS + 1):
        for device in (a, b):
            synchronize(device)
        start = time.perf_counter()
        for tensor, stream, target in messages:
            with use_streams([stream]):
                tensor.to(target, non_blocking=True)
        for device in (a, b):
            synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def _hand_over_ms() -> float:
    there: queue.SimpleQueue[int] = queue.SimpleQueue()
    back: queue.SimpleQueue[int] = queue.SimpleQueue()

    def answer() -> None:
        for _ in range(_HAND_OVERS):
            back.put(there.get())

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    times = []
    for k in range(_HAND_OVERS):
        start = time.perf_counter()
        there.put(k)
        back.get()
        times.append(1e3 * (time.perf_counter() - start) / 2)
    thread.join()
    return statistics.median(times)
