"""What the whole graph takes on a part of a GPU while the other parts are as busy as in a step.

They have processors of their own and one memory: what moves bytes is slower beside others. Each
part is held up until the host has launched on all of them, so that the host's time is no part of
what is measured.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence

from torch import OutOfMemoryError, Tensor

from fxpipe.costs.criterion import Criterion
from fxpipe.costs.twin import Twin
from fxpipe.costs.whole import Whole
from fxpipe.ir import Capture
from fxpipe.runtime.split import SplitBackward
from fxpipe.runtime.stream import (
    current_stream,
    hold_up,
    mark,
    ms_between,
    place,
    synchronize,
    use_streams,
)
from fxpipe.runtime.virtual import VirtualDevice

_REPEATS = 3


def whole_on_parts_ms(
    capture: Capture,
    given: Sequence[Tensor],
    devices: Sequence[VirtualDevice],
    criterion: Criterion | None = None,
) -> Whole | None:
    """The means over the parts, medians of several turns; None if the GPU's memory is too small."""
    try:
        twins: list[Twin] = []
        there: dict[int, Twin] = {}  # by GPU, whose weights its parts share
        for device in devices:
            twins.append(Twin(capture, given, criterion, place(device), there.get(device.gpu)))
            there.setdefault(device.gpu, twins[-1])
        for twin in twins[1:]:
            twin.drop_gradients()
        parts = _Parts(devices, twins)
        times = [parts.turn() for _ in range(1 + _REPEATS)][1:]
    except OutOfMemoryError:
        return None
    return Whole(*map(statistics.median, zip(*times, strict=True)))


class _Parts:
    """Virtual devices, each with its twin."""

    def __init__(self, devices: Sequence[VirtualDevice], twins: Sequence[Twin]) -> None:
        self._both = [*zip(devices, twins, strict=True)]
        # What the host takes at least, by what it launches: it waits where much is launched ahead.
        self._launch_ms: dict[str, float] = {}

    def turn(self) -> Whole:
        """A forward, a loss and a backward of each; and another for halves."""
        forward_ms = self._ms("forward", Twin.forward)
        loss_ms = self._ms("loss", Twin.loss)
        backward_ms = self._ms("backward", Twin.backward)
        self._ms("forward", Twin.forward)
        self._ms("loss", Twin.loss)
        return Whole(forward_ms, backward_ms, self._halves_ms(), loss_ms)

    def _halves_ms(self) -> float:
        """One half after the other: a GPU takes no more than some thousand launches ahead."""
        splits: dict[Twin, SplitBackward] = {}

        def first(twin: Twin) -> None:
            splits[twin] = twin.input_gradients()

        try:
            ms = self._ms("first half", first)
        except OutOfMemoryError:
            raise
        except RuntimeError:
            return math.inf
        return ms + self._ms("second half", lambda twin: splits.pop(twin).weight_gradients())

    def _ms(self, name: str, run: Callable[[Twin], None]) -> float:
        """Milliseconds of `run` on a part, all of them at it at once."""
        for device, _ in self._both:
            synchronize(device)
        for device, _ in self._both:
            hold_up(current_stream(device), 1.5 * self._launch_ms.get(name, 0.0))
        started = time.perf_counter()
        marks = []
        for device, twin in self._both:
            stream = current_stream(device)
            with use_streams([stream]):
                start = mark(stream)
                run(twin)
                marks.append((start, mark(stream)))
        launch_ms = 1e3 * (time.perf_counter() - started)
        self._launch_ms[name] = min(launch_ms, self._launch_ms.get(name, math.inf))
        for device, _ in self._both:
            synchronize(device)
        return statistics.mean(ms_between(start, end) for start, end in marks)
