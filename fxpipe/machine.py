"""What is measured of the machine rather than of the model: links between devices."""

import queue
import statistics
import threading
import time
from collections.abc import Sequence

import torch

from fxpipe.ir import Link
from fxpipe.runtime.stream import Device, place, synchronize

_SMALL_BYTES = 4 * 1024
_LARGE_BYTES = 64 * 1024**2


def measure_link(devices: Sequence[Device]) -> Link:
    """Latency and bandwidth from the first device to the next.

    Lanes of one device hand a tensor over without copying it: what remains is to wake a thread.
    """
    source, target = place(devices[0]), place(devices[min(1, len(devices) - 1)])
    if source == target:
        return Link(latency_ms=_hand_over_ms(), bytes_per_ms=float("inf"))
    small, large = (_copy_ms(source, target, n_bytes) for n_bytes in (_SMALL_BYTES, _LARGE_BYTES))
    return Link(latency_ms=small, bytes_per_ms=(_LARGE_BYTES - _SMALL_BYTES) / (large - small))


def _copy_ms(source: torch.device, target: torch.device, n_bytes: int) -> float:
    tensor = torch.empty(n_bytes, dtype=torch.uint8, device=source)
    times = []
    for _ in range(6):
        synchronize(source)
        synchronize(target)
        start = time.perf_counter()
        tensor.to(target)
        synchronize(target)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def _hand_over_ms(n_times: int = 100) -> float:
    there: queue.SimpleQueue[int] = queue.SimpleQueue()
    back: queue.SimpleQueue[int] = queue.SimpleQueue()

    def answer() -> None:
        for _ in range(n_times):
            back.put(there.get())

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    times = []
    for k in range(n_times):
        start = time.perf_counter()
        there.put(k)
        back.get()
        times.append(1e3 * (time.perf_counter() - start) / 2)
    thread.join()
    return statistics.median(times)
