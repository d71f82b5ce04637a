"""What the whole graph takes on a CPU lane while the other lanes are as busy as in a step.

Lanes share caches, memory and Python's lock: beside others each is slower than alone. So is a
backward that finds nothing of its forward in the caches, for other micro-batches came between.
Lanes apart, each in a process, have a lock each, which is what slows small ops most: for these the
others stay idle.
"""

import copy
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fxpipe.criterion import Criterion, Outputs
from fxpipe.ir import Capture
from fxpipe.runtime.drawing import drawing
from fxpipe.runtime.lanes import Lanes
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.split import SplitBackward
from fxpipe.runtime.stream import Device
from fxpipe.runtime.whole_backward import backward_of
from fxpipe.straight import straight

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

    def begun(keeps_gradients: bool) -> _Twin:
        try:
            twin = _Twin(capture, given, criterion)
            if not keeps_gradients:
                twin.drop_gradients()
            twin.forward_ms()
            twin.loss_ms()
            twin.backward_ms()
        finally:
            all_busy.wait()
        return twin

    def measured() -> None:
        twin = begun(keeps_gradients=True)
        try:
            for _ in range(_BETWEEN):
                twin.forward_ms()
            for _ in range(_REPEATS):
                forward_ms, loss_ms = twin.forward_ms(), twin.loss_ms()
                backward_ms = twin.backward_ms()
                twin.forward_ms()
                twin.loss_ms()
                times.append(Whole(forward_ms, backward_ms, twin.halves_ms(), loss_ms))
        finally:
            over.set()

    def beside() -> None:
        if apart:
            return
        twin = begun(keeps_gradients=False)
        while not over.is_set():
            twin.forward_ms()
            twin.loss_ms()
            twin.backward_ms()

    Lanes(devices).run([measured, *[beside] * (len(devices) - 1)], over.set)
    return Whole(*map(statistics.median, zip(*times, strict=True)))


class _Twin:
    """The graph with parameters of its own that share the model's memory, and its own buffers."""

    def __init__(
        self, capture: Capture, given: Sequence[Tensor], criterion: Criterion | None
    ) -> None:
        self._given = given
        self._criterion = criterion
        read = {str(node.target) for node in capture.graph.find_nodes(op="get_attr")}
        tensors = {name: tensor for name, tensor in capture.state.items() if name in read}
        held = [
            *tensors.values(),
            *(p for m in capture.modules.values() for p in m.parameters()),
        ]
        known = {id(p): _leaf(p) for p in held if isinstance(p, nn.Parameter)}
        self._parameters = list(known.values())
        # Copies of what is known are those: so modules and state share each parameter.
        modules, state = copy.deepcopy((dict(capture.modules), tensors), known)
        self._run = straight(capture, modules, state)
        self._backward = backward_of(self._parameters)
        self._draws = any(op.random for op in capture.ops.values())
        # The outputs, and what could be a stage's input.
        self._in_flight: deque[tuple[Outputs, Tensor | None]] = deque()
        self._gradients: list[Tensor | None] = []  # of the oldest one's outputs

    def drop_gradients(self) -> None:
        """Hold no gradients: only one lane's worth of them is there."""
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]

    def forward_ms(self) -> float:
        """Milliseconds of another micro-batch's forward, which draws as a stage does."""
        start = time.perf_counter()
        given = [tensor.clone() for tensor in self._given]
        with drawing(RandomStream(0), _CPU, self._run) if self._draws else nullcontext():
            outputs, first = self._run(*given)
        ms = 1e3 * (time.perf_counter() - start)
        self._in_flight.append((outputs, first))
        return ms

    def loss_ms(self) -> float:
        """Milliseconds of the oldest micro-batch's loss; without a criterion, of mere ones."""
        outputs, _ = self._in_flight[0]
        start = time.perf_counter()
        if self._criterion is None:
            self._gradients = [
                torch.ones_like(output) if output is not None and output.requires_grad else None
                for output in outputs
            ]
        else:
            self._gradients = self._criterion.gradients(outputs)
        return 1e3 * (time.perf_counter() - start)

    def backward_ms(self) -> float:
        """Milliseconds of the oldest micro-batch's backward, behind its loss."""
        outputs, gradients, _ = self._oldest()
        start = time.perf_counter()
        self._backward([get_gradient_edge(output) for output in outputs], gradients)
        return 1e3 * (time.perf_counter() - start)

    def halves_ms(self) -> float:
        """Milliseconds of the oldest micro-batch's backward in halves."""
        outputs, gradients, first = self._oldest()
        start = time.perf_counter()
        edges = [get_gradient_edge(output) for output in outputs]
        try:
            split = SplitBackward(edges, gradients)
            split.input_gradients([get_gradient_edge(first)] if first is not None else [])
            split.weight_gradients()
        except RuntimeError:
            return math.inf
        return 1e3 * (time.perf_counter() - start)

    def _oldest(self) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """What it leaves behind: the outputs that have gradients, these, and its first value."""
        outputs, first = self._in_flight.popleft()
        both = zip(outputs, self._gradients, strict=True)
        pairs = [(output, g) for output, g in both if output is not None and g is not None]
        self._gradients = []
        return [output for output, _ in pairs], [g for _, g in pairs], first


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach(), parameter.requires_grad)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
