"""What the whole graph takes on a GPU, or on its parts at once, and what launching that takes.

Parts have processors of their own, and one memory and one supply of power: what moves bytes is
slower beside others, and a GPU that takes all the power it may have lowers its clock within a tenth
of a second. So they are measured while they have no rest, if the host launches faster than they
compute. Else each part is held up until the host has launched on all of them, so that the host's
time is no part of that.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import OutOfMemoryError, Tensor

from fxpipe.costs.criterion import Criterion
from fxpipe.costs.launching import launching
from fxpipe.costs.twin import Twin
from fxpipe.costs.whole import Whole
from fxpipe.ir import Capture, Launch
from fxpipe.runtime.lanes import Lanes
from fxpipe.runtime.split import SplitBackward
from fxpipe.runtime.stream import (
    Device,
    Mark,
    current_stream,
    hold_up,
    mark,
    ms_between,
    place,
    synchronize,
    use_streams,
)

_REPEATS = 3
_SPELL_MS = 2000.0  # without a rest, of which the second half counts
_AHEAD = 0.9  # of what a turn takes at most what it takes to launch one, to have no rest

_Phase = Callable[[Twin], None]
_Marks = list[tuple[Mark, Mark]]
_TURN: Sequence[_Phase] = (Twin.forward, Twin.loss, Twin.backward)


def whole_on_gpus(
    capture: Capture,
    given: Sequence[Tensor],
    devices: Sequence[Device],
    criterion: Criterion | None = None,
) -> tuple[Whole, Launch] | None:
    """The means over `devices`, medians of several turns, and what launching takes.

    None if a GPU's memory is too small.
    """
    try:
        twins: list[Twin] = []
        there: dict[torch.device, Twin] = {}  # by GPU, whose weights its parts share
        for device in devices:
            gpu = place(device)
            twins.append(Twin(capture, given, criterion, gpu, there.get(gpu)))
            there.setdefault(gpu, twins[-1])
        for twin in twins[1:]:
            twin.drop_gradients()
        parts = _Parts(devices, twins)
        turns = [parts.turn() for _ in range(1 + _REPEATS)][1:]
        launch, together_ms = parts.launching(len(capture.ops))
        if together_ms < _AHEAD * parts.taken_ms:
            turns = parts.spell(_SPELL_MS)
    except OutOfMemoryError:
        return None
    return Whole(*map(statistics.median, zip(*turns, strict=True))), launch


class _Parts:
    """Devices, each with its twin."""

    def __init__(self, devices: Sequence[Device], twins: Sequence[Twin]) -> None:
        self._both = [*zip(devices, twins, strict=True)]
        self._lanes = Lanes(devices)
        self._splits: dict[Twin, SplitBackward] = {}
        self._phases = [Twin.forward, Twin.loss, Twin.backward, Twin.forward, Twin.loss]
        self._halves = [self._first_half, self._second_half]
        # By phase, what the host took to launch it on all parts, and what the parts took.
        self._launch_ms: dict[_Phase, float] = {}
        self._taken_ms: dict[_Phase, float] = {}

    @property
    def taken_ms(self) -> float:
        """What the parts took for the last turn's forward, loss and backward."""
        return sum(self._taken_ms[run] for run in _TURN)

    def turn(self) -> Whole:
        """A forward, a loss and a backward of each; and another for halves. Each by itself.

        One half after the other: a GPU takes no more than some thousand launches ahead.
        """
        whole = [self._ms(run) for run in self._phases]
        try:
            halves = [self._ms(run) for run in self._halves]
        except OutOfMemoryError:
            raise
        except RuntimeError:
            self._halves = []
            halves = []
        return _whole(whole, halves)

    def spell(self, ms: float) -> list[Whole]:
        """The later ones of turns that follow each other at once for so long."""
        phases = self._phases + self._halves
        n = 2 * math.ceil(max(_REPEATS, ms / sum(self._taken_ms[run] for run in phases) / 2))
        marks = [*zip(*self._by_threads(phases * n), strict=True)]
        self._synchronize()
        times = [_mean_ms(pairs) for pairs in marks]
        turns = [times[k : k + len(phases)] for k in range(0, len(times), len(phases))]
        first = len(self._phases)
        return [_whole(turn[:first], turn[first:]) for turn in turns[n // 2 :]]

    def launching(self, n_ops: int) -> tuple[Launch, float]:
        """What the host takes for a graph of so many ops, and for a turn of all parts at once."""
        return launching(self._both, self._lanes, n_ops)

    def _by_threads(self, phases: Sequence[_Phase]) -> list[_Marks]:
        """For each part its marks of these phases, which a thread of its own launches."""
        found: list[_Marks] = [[] for _ in self._both]

        def launch(device: Device, twin: Twin, marks: _Marks) -> None:
            stream = current_stream(device)
            for run in phases:
                start = mark(stream)
                run(twin)
                marks.append((start, mark(stream)))

        jobs = [
            partial(launch, *both, marks) for both, marks in zip(self._both, found, strict=True)
        ]
        self._lanes.run(jobs, lambda: None)
        return found

    def _first_half(self, twin: Twin) -> None:
        self._splits[twin] = twin.input_gradients()

    def _second_half(self, twin: Twin) -> None:
        self._splits.pop(twin).weight_gradients()

    def _ms(self, run: _Phase) -> float:
        """Milliseconds of `run` on a part, all of them at it at once."""
        self._hold_up(1.5 * self._launch_ms.get(run, 0.0))
        started = time.perf_counter()
        marks = self._launch(run)
        launch_ms = 1e3 * (time.perf_counter() - started)
        self._launch_ms[run] = min(launch_ms, self._launch_ms.get(run, math.inf))
        self._synchronize()
        self._taken_ms[run] = _mean_ms(marks)
        return self._taken_ms[run]

    def _launch(self, run: _Phase) -> _Marks:
        marks = []
        for device, twin in self._both:
            stream = current_stream(device)
            with use_streams([stream]):
                start = mark(stream)
                run(twin)
                marks.append((start, mark(stream)))
        return marks

    def _hold_up(self, ms: float) -> None:
        self._synchronize()
        for device, _ in self._both:
            hold_up(current_stream(device), ms)

    def _synchronize(self) -> None:
        for device, _ in self._both:
            synchronize(device)


def _whole(phases: Sequence[float], halves: Sequence[float]) -> Whole:
    forward_ms, loss_ms, backward_ms, *_ = phases
    return Whole(forward_ms, backward_ms, sum(halves) if halves else math.inf, loss_ms)


def _mean_ms(marks: Sequence[tuple[Mark, Mark]]) -> float:
    return statistics.mean(ms_between(start, end) for start, end in marks)
