"""What the whole graph takes on a CPU lane while the other lanes are as busy as in a step.

Lanes share caches, memory and Python's lock: beside others each is slower than alone. So is a
backward that finds nothing of its forward in the caches, for other micro-batches came between.
Lanes apart, each in a process, have a lock each, which is what slows small ops most: for these the
others stay idle.
"""

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxpipe.costs.criterion import Criterion
from fxpipe.costs.twin import Twin
from fxpipe.ir import Capture
from fxpipe.runtime.lanes import Lanes
from fxpipe.runtime.stream import Device

_CPU = torch.device("cpu")
_REPEATS = 4
_BETWEEN = 2  # micro-batches whose forwards come between a forward and its backward


class Whole(NamedTuple):
    """Milliseconds of a forward, and of a backward that adds to the gradients, in one or halved.

    Halves are infinitely long where an op does not allow them, as torch's reentrant checkpoint.
    The loss comes between the two, where there is one.
    """

    forward_ms: float
    backward_ms: float
    halves_ms: float
    loss_ms: float


def whole_ms(
    capture: Capture,
    given: Sequence[Tensor],
    devices: Sequence[Device],
    criterion: Criterion | None = None,
    apart: bool = False,
) -> Whole:
    """The medians of several turns on one lane."""
    all_busy, over = threading.Barrier(1 if apart else len(devices)), threading.Event()
    times: list[Whole] = []

    def begun(keeps_gradients: bool) -> Twin:
        try:
            twin = Twin(capture, given, criterion, _CPU)
            if not keeps_gradients:
                twin.drop_gradients()
            twin.forward()
            twin.loss()
            twin.backward()
        finally:
            all_busy.wait()
        return twin

    def measured() -> None:
        twin = begun(keeps_gradients=True)
        try:
            for _ in range(_BETWEEN):
                twin.forward()
            for _ in range(_REPEATS):
                forward_ms, loss_ms = _ms(twin.forward), _ms(twin.loss)
                backward_ms = _ms(twin.backward)
                twin.forward()
                twin.loss()
                times.append(Whole(forward_ms, backward_ms, _halves_ms(twin), loss_ms))
        finally:
            over.set()

    def beside() -> None:
        if apart:
            return
        twin = begun(keeps_gradients=False)
        while not over.is_set():
            twin.forward()
            twin.loss()
            twin.backward()

    Lanes(devices).run([measured, *[beside] * (len(devices) - 1)], over.set)
    return Whole(*map(statistics.median, zip(*times, strict=True)))


def _halves_ms(twin: Twin) -> float:
    try:
        return _ms(lambda: twin.input_gradients().weight_gradients())
    except RuntimeError:
        return math.inf


def _ms(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)
