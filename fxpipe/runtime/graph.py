"""A whole training step as one CUDA graph: captured once for each shape, then replayed.

What the host does in a step, launching kernels above all, is then done once. A graph reads and
writes the same memory each time: inputs are copied in, the loss is copied out, and gradients are
added up in tensors that stay where they are.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from fxpipe.errors import FxpipeError
from fxpipe.runtime import stream
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.end import LossFn
from fxpipe.runtime.graph_room import GraphRoom, captured, graph_room, in_room
from fxpipe.runtime.microbatch import map_tensors
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.stream import Device
from fxpipe.runtime.swapping import holder_of

# A step's loss and its inputs' gradients.
Outcome = tuple[Tensor, list[Tensor | None]]
StepFunction = Callable[[Sequence[Tensor], Any, LossFn, GradScaler | None], Outcome]

_MOST = 8  # graphs that are kept, the oldest going first


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step: the memory that it reads, what it gives, and how to run it."""

    given: Sequence[Tensor]
    outcome: Outcome
    trained: Sequence[nn.Parameter]
    replay: Callable[[], None]


class Graphs:
    """The captured steps of one pipeline."""

    def __init__(self, devices: Sequence[Device], stages: Sequence[Stage]) -> None:
        self._devices = tuple(devices)
        self._stages = tuple(stages)
        self._room: GraphRoom | None = None
        self._graphs: dict[object, _Graph | str] = {}
        # Where each parameter's gradient is added up, whichever graph runs.
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._told: set[str] = set()

    def step(
        self,
        in_order: StepFunction,
        eager: StepFunction,
        inputs: Sequence[Tensor],
        target: Any,
        loss_fn: LossFn,
        scaler: GradScaler | None,
    ) -> Outcome:
        """The step as a graph, captured if it is new.

        `in_order` is one on the calling thread alone, as it is captured, `eager` one on all lanes:
        it runs, after a warning that says why, where the step can't be captured.
        """
        found: _Graph | str | None = obstacle(self._devices, self._stages)
        if found is None:
            key = self._key(inputs, target, loss_fn, scaler)
            try:
                found = self._graphs.get(key)
            except TypeError as error:  # an argument that is no tensor, and has no hash
                found = f"what is in target, and loss_fn, must be comparable: {error}"
        if found is None:
            found = self._graphs[key] = self._captured(in_order, inputs, target, loss_fn, scaler)
            self._forget()
        if isinstance(found, str):
            self._tell(f"capture='graph', but the step runs eagerly: {found}")
            return eager(inputs, target, loss_fn, scaler)
        for buffer, tensor in zip(found.given, [*inputs, *_tensors(target)], strict=True):
            buffer.detach().copy_(tensor.detach())
        self._take_gradients(found.trained)
        found.replay()
        loss, gradients = found.outcome
        return loss.clone(), [
            None if gradient is None else gradient.to(tensor.device, copy=True)
            for gradient, tensor in zip(gradients, inputs, strict=True)
        ]

    def _captured(
        self,
        in_order: StepFunction,
        inputs: Sequence[Tensor],
        target: Any,
        loss_fn: LossFn,
        scaler: GradScaler | None,
    ) -> _Graph | str:
        """The graph, without effect on gradients and buffers; or why there is none.

        Raises what an eager step raises.
        """
        device = stream.place(self._devices[0])
        given = [_buffer(tensor, device).requires_grad_(tensor.requires_grad) for tensor in inputs]
        own_target = map_tensors(lambda tensor: _buffer(tensor, device), target)
        buffers = [*given, *_tensors(own_target)]
        for buffer, tensor in zip(buffers, [*inputs, *_tensors(target)], strict=True):
            buffer.detach().copy_(tensor.detach())
        parameters = self._parameters()
        room = self._room = self._room or graph_room(device)

        def run() -> Outcome:
            # A cast of a weight that was cached before would stay as it was for ever.
            with Ambient.capture().autocasting(cache=False):
                return in_order(given, own_target, loss_fn, scaler)

        with self._unchanged(parameters) as replaced:
            for parameter in parameters:
                parameter.grad = None
            # Twice: libraries set themselves up, and gradients are added to those of the first. On
            # the stream that captures, since autograd may remember the one it ran on.
            with in_room(room):
                run()
                run()
            if replaced():
                return f"{replaced()} is replaced in a step instead of being written into"
            trained = [parameter for parameter in parameters if parameter.grad is not None]
            for parameter in trained:
                assert parameter.grad is not None
                parameter.grad = self._gradients.setdefault(parameter, parameter.grad)
            try:
                outcome, replay = captured(room, run)
            except (FxpipeError, RuntimeError) as error:
                return _cause(error)
            moved = [p for p in trained if p.grad is not self._gradients[p]]
            if moved:
                return f"a gradient of shape {list(moved[0].shape)} is not added up in place"
        return _Graph(buffers, outcome, trained, replay)

    @contextmanager
    def _unchanged(self, parameters: Sequence[nn.Parameter]) -> Iterator[Callable[[], str]]:
        """Give gradients and written buffers back as they were.

        Yields what names a buffer that was replaced.
        """
        gradients = [parameter.grad for parameter in parameters]
        places = [
            (holder_of(stage.module, name)._buffers, name)
            for stage in self._stages
            for name in stage.spec.mutated_buffers
        ]
        held = [(buffers, name, _of(buffers, name)) for buffers, name in places]
        values = [buffer.clone() for _, _, buffer in held]

        def replaced() -> str:
            changed = [name for buffers, name, buffer in held if _of(buffers, name) is not buffer]
            return f"buffer {changed[0]!r}" if changed else ""

        try:
            yield replaced
        finally:
            with torch.no_grad():
                for (buffers, name, buffer), value in zip(held, values, strict=True):
                    buffer.copy_(value)
                    buffers[name.rpartition(".")[2]] = buffer
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def _take_gradients(self, trained: Sequence[nn.Parameter]) -> None:
        """Let the gradients that there are be where the graph adds to them."""
        absent = []
        for parameter in trained:
            own = self._gradients[parameter]
            if parameter.grad is None:
                absent.append(own)
            elif parameter.grad is not own:
                own.copy_(parameter.grad)
            parameter.grad = own
        if absent:
            torch._foreach_zero_(absent)

    def _parameters(self) -> list[nn.Parameter]:
        every = (parameter for stage in self._stages for parameter in stage.module.parameters())
        return [*dict.fromkeys(parameter for parameter in every if parameter.requires_grad)]

    def _key(
        self, inputs: Sequence[Tensor], target: Any, loss_fn: LossFn, scaler: GradScaler | None
    ) -> object:
        """All that a graph holds fast."""
        # Buffers that a step writes stay where they are, or `_captured` finds that they do not.
        read = [
            _of(holder_of(stage.module, name)._buffers, name)
            for stage in self._stages
            for name in stage.spec.buffers
            if name not in stage.spec.mutated_buffers
        ]
        weights = [p for stage in self._stages for p in stage.module.parameters()]
        modes = [module.training for stage in self._stages for module in stage.module.modules()]
        return (
            _shape(inputs),
            _shape(target),
            loss_fn,
            scaler,
            Ambient.capture(),
            *(tensor.data_ptr() for tensor in (*read, *weights)),
            *(weight.requires_grad for weight in weights),
            *modes,
        )

    def _forget(self) -> None:
        if len(self._graphs) > _MOST:
            del self._graphs[next(iter(self._graphs))]
            self._tell(
                f"capture='graph' has captured more than {_MOST} different steps, each of which "
                "takes long: give each step the same loss_fn object, and batches of few sizes"
            )

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=4)


def obstacle(devices: Sequence[Device], stages: Sequence[Stage]) -> str | None:
    """Why no step of such a pipeline can be captured."""
    places = {stream.place(device) for device in devices}
    if any(where.type != "cuda" for where in places):
        return f"no CUDA device, stages are on {', '.join(sorted(map(str, places)))}"
    if len(places) > 1:
        return f"the stages are on {len(places)} GPUs, and torch captures the memory of one"
    random = next((stage for stage in stages if stage.spec.random), None)
    if random is not None:
        return (
            f"stage {random.index} ({random.spec.file}) draws random numbers, each micro-batch its "
            "own, from generators that are set anew in each step"
        )
    return None


def _shape(node: Any) -> object:
    """What of an argument a graph holds fast: of tensors all but the values."""
    if isinstance(node, Tensor):
        return tuple(node.shape), node.stride(), node.dtype, node.requires_grad
    if isinstance(node, Mapping):
        return tuple((key, _shape(value)) for key, value in node.items())
    if isinstance(node, tuple | list):
        return type(node), tuple(map(_shape, node))
    return node


def _cause(error: BaseException) -> str:
    """What went wrong in a capture, whose end then fails as well."""
    chain = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    # A stage's error says where.
    first = next((one for one in chain if isinstance(one, FxpipeError)), chain[-1])
    return str(first).partition("\n")[0]


def _tensors(node: Any) -> list[Tensor]:
    """The tensors in an argument, in order."""
    found: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(see, node)
    return found


def _buffer(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device, requires_grad=False)


def _of(buffers: Mapping[str, Tensor | None], name: str) -> Tensor:
    buffer = buffers[name.rpartition(".")[2]]
    assert buffer is not None
    return buffer
