"""Clocks that tell how long an op takes: what `Meter` asks, and the one that measures."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fxpipe.runtime.stream import hold_up, mark, ms_between, synchronize

# Milliseconds of `run(given())`, but for what `given` takes.
Clock = Callable[[Callable[[Any], object], Callable[[], Any]], float]

# Of three times one may be anything, on a machine that has something else to do. More than that are
# taken of short ops, fewer of ops that take very long.
_MOST, _LEAST = 5, 3
_ENOUGH_MS, _LONG_MS = 50.0, 400.0


class StopWatch:
    """A clock that measures: the median of a few runs on `device`, behind those that warm up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alone = device.type == "cpu" and torch.get_num_threads() == 1

    def __call__(self, run: Callable[[Any], object], given: Callable[[], Any]) -> float:
        """Run until the time is known well enough."""
        if self._device.type == "cpu":
            self._host_ms(run, given)
            return _median(lambda: self._host_ms(run, given))
        # A first run sets libraries up, a second tells what the host takes.
        self._gpu_ms(run, given, 0.0)
        _, launch_ms = self._gpu_ms(run, given, 0.0)
        return _median(lambda: self._gpu_ms(run, given, 2 * launch_ms)[0])

    def _host_ms(self, run: Callable[[Any], object], given: Callable[[], Any]) -> float:
        """Milliseconds of the host.

        Where this thread does all the work, only those in which it had a processor: what else the
        machine does is no cost of the op.
        """
        clock = time.thread_time if self._alone else time.perf_counter
        values = given()
        start = clock()
        run(values)
        return 1e3 * (clock() - start)

    def _gpu_ms(
        self, run: Callable[[Any], object], given: Callable[[], Any], held_up_ms: float
    ) -> tuple[float, float]:
        """The GPU's own milliseconds, by events, and the host's, to launch.

        The GPU is held up until all is launched: else what it waits for the host would count.
        """
        on = torch.cuda.current_stream(self._device)
        values = given()
        synchronize(self._device)
        hold_up(on, held_up_ms)
        began = time.perf_counter()
        start = mark(on)
        run(values)
        end = mark(on)
        launch_ms = 1e3 * (time.perf_counter() - began)
        synchronize(self._device)
        return ms_between(start, end), launch_ms


def _median(time_ms: Callable[[], float]) -> float:
    """Of as many times as it takes."""
    times = [time_ms()]
    while len(times) < _MOST and sum(times) < (_LONG_MS if len(times) < _LEAST else _ENOUGH_MS):
        times.append(time_ms())
    return statistics.median(times)
