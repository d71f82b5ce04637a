"""Clocks that tell how long an op takes: what `Meter` asks, and the one that measures."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fxpipe.runtime.stream import hold_up, mark, ms_between, synchronize

# Milliseconds of `run(given())`, but for what `given` takes.
Clock = Callable[[Callable[[Any], object], Callable[[], Any]], float]

_REPEATS = 5
_ENOUGH_MS = 50.0  # an op that took this long in all is known well enough


class StopWatch:
    """A clock that measures: the median of a few runs on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alone = device.type == "cpu" and torch.get_num_threads() == 1

    def __call__(self, run: Callable[[Any], object], given: Callable[[], Any]) -> float:
        """Run until the time is known well enough."""
        if self._device.type != "cpu":
            return self._gpus(run, given)
        times: list[float] = []
        while len(times) < _REPEATS and sum(times) < _ENOUGH_MS:
            values = given()
            start = self._now()
            run(values)
            times.append(self._now() - start)
        return statistics.median(times[1:] or times)

    def _now(self) -> float:
        """Milliseconds of the host.

        Where this thread does all the work, only those in which it had a processor: what else the
        machine does is no cost of the op.
        """
        return 1e3 * (time.thread_time() if self._alone else time.perf_counter())

    def _gpus(self, run: Callable[[Any], object], given: Callable[[], Any]) -> float:
        """The GPU's own time, by events; it is held up until the host has launched all.

        A first run sets libraries up, a second tells what the host takes.
        """
        on = torch.cuda.current_stream(self._device)
        times: list[float] = []
        launch_ms = 0.0
        while len(times) < 2 + _REPEATS and sum(times[2:]) < _ENOUGH_MS:
            values = given()
            synchronize(self._device)
            hold_up(on, 2 * launch_ms if len(times) > 1 else 0.0)
            began = time.perf_counter()
            start = mark(on)
            run(values)
            end = mark(on)
            launch_ms = 1e3 * (time.perf_counter() - began)
            synchronize(self._device)
            times.append(ms_between(start, end))
        return statistics.median(times[2:])
