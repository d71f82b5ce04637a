"""What the whole graph takes on a CPU lane while the other lanes are as busy as in a step.

Lanes share caches, memory and Python's lock: beside others each is slower than alone.
"""

import copy
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge

from fxpipe.interpret import DTYPE, TRAINING, Compute, run_graph
from fxpipe.ir import Capture
from fxpipe.runtime.lanes import Lanes
from fxpipe.runtime.split import SplitBackward
from fxpipe.runtime.stream import Device

_REPEATS = 5


class Whole(NamedTuple):
    """Milliseconds of a forward, and of a backward that adds to the gradients, in one or halved.

    Halves are infinitely long where an op does not allow them, as torch's reentrant checkpoint.
    """

    forward_ms: float
    backward_ms: float
    halves_ms: float


def whole_ms(capture: Capture, given: Sequence[Tensor], devices: Sequence[Device]) -> Whole:
    """The medians of several turns on one lane."""
    all_busy, over = threading.Barrier(len(devices)), threading.Event()
    times: list[Whole] = []

    def begun(keeps_gradients: bool) -> _Twin:
        try:
            twin = _Twin(capture, given)
            if not keeps_gradients:
                twin.drop_gradients()
            twin.run_ms(_backward)
        finally:
            all_busy.wait()
        return twin

    def measured() -> None:
        twin = begun(keeps_gradients=True)
        try:
            for _ in range(_REPEATS):
                times.append(Whole(*twin.run_ms(_backward), twin.halves_ms()))
        finally:
            over.set()

    def beside() -> None:
        twin = begun(keeps_gradients=False)
        while not over.is_set():
            twin.run_ms(_backward)

    Lanes(devices).run([measured, *[beside] * (len(devices) - 1)], over.set)
    return Whole(*map(statistics.median, zip(*times, strict=True)))


class _Twin:
    """The graph with parameters of its own that share the model's memory, and its own buffers."""

    def __init__(self, capture: Capture, given: Sequence[Tensor]) -> None:
        self._graph = capture.graph
        self._given = given
        held = [
            *capture.state.values(),
            *(p for m in capture.modules.values() for p in m.parameters()),
        ]
        known = {id(p): _leaf(p) for p in held if isinstance(p, nn.Parameter)}
        self._parameters = list(known.values())
        # Copies of what is known are those: so modules and state share each parameter.
        self._modules, state = copy.deepcopy((dict(capture.modules), dict(capture.state)), known)
        self._state = {**state, TRAINING: True, DTYPE: capture.dtype}

    def drop_gradients(self) -> None:
        """Hold no gradients: only one lane's worth of them is there."""
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]

    def run_ms(self, backward: "_Way") -> tuple[float, float]:
        """Milliseconds of a forward and of its backward."""
        inputs = [tensor.clone() for tensor in self._given]
        first: list[Tensor] = []

        def note(
            node: fx.Node, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            value = compute(args, kwargs)
            if not first and isinstance(value, Tensor) and value.requires_grad:
                first.append(value)
            return value

        start = time.perf_counter()
        outputs = run_graph(self._graph, self._modules, self._state, inputs, note)
        between = time.perf_counter()
        made = [o for o in outputs if o is not None and o.requires_grad]
        backward(made, first)
        return 1e3 * (between - start), 1e3 * (time.perf_counter() - between)

    def halves_ms(self) -> float:
        """Milliseconds of a backward in halves."""
        try:
            return self.run_ms(_halves)[1]
        except RuntimeError:
            return math.inf


# Runs the backward of a graph from its outputs; also given is what could be a stage's input.
_Way = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


def _backward(outputs: Sequence[Tensor], _: Sequence[Tensor]) -> None:
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def _halves(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    edges = [get_gradient_edge(output) for output in outputs]
    split = SplitBackward(edges, [torch.ones_like(output) for output in outputs])
    split.input_gradients([get_gradient_edge(given) for given in inputs])
    split.weight_gradients()


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach(), parameter.requires_grad)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
