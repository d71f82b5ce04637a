"""A captured graph that runs as stages do, on parameters of its own in the model's memory."""

import copy
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fxpipe.costs.criterion import Criterion, Outputs
from fxpipe.costs.straight import straight
from fxpipe.ir import Capture
from fxpipe.runtime.drawing import drawing
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.split import SplitBackward
from fxpipe.runtime.whole_backward import backward_of


class Twin:
    """The graph with parameters of its own that share the model's memory, and its own buffers.

    On another device than the model's they are copies, or share the memory of those of `like`, a
    twin there.
    """

    def __init__(
        self,
        capture: Capture,
        given: Sequence[Tensor],
        criterion: Criterion | None,
        device: torch.device,
        like: "Twin | None" = None,
    ) -> None:
        self._given = given
        self._criterion = criterion
        self._device = device
        read = {str(node.target) for node in capture.graph.find_nodes(op="get_attr")}
        tensors = {name: tensor for name, tensor in capture.state.items() if name in read}
        held = [
            *tensors.values(),
            *(p for m in capture.modules.values() for p in m.parameters()),
        ]
        own = [p for p in held if isinstance(p, nn.Parameter)]
        self._leaves: dict[int, nn.Parameter] = {
            id(p): _leaf(like._leaves[id(p)] if like else p, device) for p in own
        }
        self._parameters = list(self._leaves.values())
        # Copies of what is known are those: so modules and state share each parameter.
        modules, state = copy.deepcopy((dict(capture.modules), tensors), {**self._leaves})
        modules = {name: module.to(device) for name, module in modules.items()}
        state = {name: tensor.to(device) for name, tensor in state.items()}
        self._run = straight(capture, modules, state, device)
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

    def forward(self) -> None:
        """Another micro-batch's forward, which draws as a stage does."""
        given = [tensor.clone() for tensor in self._given]
        with drawing(RandomStream(0), self._device, self._run) if self._draws else nullcontext():
            outputs, first = self._run(*given)
        self._in_flight.append((outputs, first))

    def loss(self) -> None:
        """The oldest micro-batch's loss; without a criterion, a mere gradient."""
        outputs, _ = self._in_flight[0]
        if self._criterion is None:
            self._gradients = [
                torch.ones_like(output) if output is not None and output.requires_grad else None
                for output in outputs
            ]
        else:
            self._gradients = self._criterion.gradients(outputs)

    def backward(self) -> None:
        """The oldest micro-batch's backward, behind its loss."""
        outputs, gradients, _ = self._oldest()
        self._backward([get_gradient_edge(output) for output in outputs], gradients)

    def input_gradients(self) -> SplitBackward:
        """The first half of the oldest micro-batch's backward, which the second goes on from.

        Raises RuntimeError if an op refuses it.
        """
        outputs, gradients, first = self._oldest()
        edges = [get_gradient_edge(output) for output in outputs]
        split = SplitBackward(edges, gradients, self._backward)
        split.input_gradients([get_gradient_edge(first)] if first is not None else [])
        return split

    def _oldest(self) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """What it leaves behind: the outputs that have gradients, these, and its first value."""
        outputs, first = self._in_flight.popleft()
        both = zip(outputs, self._gradients, strict=True)
        pairs = [(output, g) for output, g in both if output is not None and g is not None]
        self._gradients = []
        return [output for output, _ in pairs], [g for _, g in pairs], first


def _leaf(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(device), parameter.requires_grad)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
