"""What the whole graph takes on a CPU lane while the other lanes are as busy as in a step.

Lanes share caches, memory and Python's lock: beside others each is slower than alone.
"""

import copy
import statistics
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fxpipe.interpret import DTYPE, TRAINING, run_graph
from fxpipe.ir import Capture
from fxpipe.runtime.lanes import Lanes
from fxpipe.runtime.stream import Device

_REPEATS = 7


def whole_ms(
    capture: Capture, given: Sequence[Tensor], devices: Sequence[Device]
) -> tuple[float, float]:
    """Milliseconds of a forward, and of a backward that adds to the gradients, on one lane."""
    over = threading.Event()
    times: list[tuple[float, float]] = []

    def measured() -> None:
        twin = _Twin(capture, given)
        try:
            times.extend(twin.run_ms() for _ in range(_REPEATS + 1))
        finally:
            over.set()

    def beside() -> None:
        twin = _Twin(capture, given)
        twin.drop_gradients()
        while not over.is_set():
            twin.run_ms()

    Lanes(devices).run([measured, *[beside] * (len(devices) - 1)], over.set)
    forward, backward = zip(*times[1:], strict=True)
    return statistics.median(forward), statistics.median(backward)


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

    def run_ms(self) -> tuple[float, float]:
        """Milliseconds of a forward and of its backward."""
        inputs = [tensor.clone() for tensor in self._given]
        start = time.perf_counter()
        outputs = run_graph(self._graph, self._modules, self._state, inputs)
        between = time.perf_counter()
        made = [o for o in outputs if o is not None and o.requires_grad]
        torch.autograd.backward(made, [torch.ones_like(output) for output in made])
        return 1e3 * (between - start), 1e3 * (time.perf_counter() - between)


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach(), parameter.requires_grad)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
