"""One training step by the schedule table: each lane runs its row, action by action.

Stages share no autograd graph: what a stage receives enters its graph through `Receive`, which
catches the gradient, and each backward is called by the stage's own lane.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpipe.runtime.ambient import without_autocast
from fxpipe.runtime.call import Call
from fxpipe.runtime.checkpoint import Replay, recomputes
from fxpipe.runtime.manifest import InputSpec
from fxpipe.runtime.portal import CALLER, Wire, add_gradients
from fxpipe.runtime.receive import Slot, receive
from fxpipe.runtime.split import SplitBackward
from fxpipe.runtime.trace import LOSS, RECOMPUTE
from fxpipe.runtime.whole_backward import backward_of
from fxpipe.schedule import Action, Kind


@dataclass(slots=True)
class _Pending:
    """What a stage keeps of a micro-batch between forward and backward.

    `edges` are its outputs' places in the graph, without their memory; with recomputation there
    are the replay and its inputs instead. `slots` are those of the inputs that have a gradient.
    """

    slots: Mapping[Wire, Slot]
    edges: Sequence[GradientEdge | None] = ()
    begins: Mapping[Wire, GradientEdge] = field(default_factory=dict)
    replay: Replay | None = None
    inputs: Mapping[Wire, Tensor] | None = None


class Step:
    """One step. `at_end(i)` runs on the last stage's lane once micro-batch i has come there.

    `halved` are the stages and micro-batches whose backward is I and W.
    """

    def __init__(
        self, call: Call, at_end: Callable[[int], None], halved: Set[tuple[int, int]]
    ) -> None:
        self._call = call
        self._at_end = at_end
        self._halved = halved
        self._backwards = [backward_of(stage.module.parameters()) for stage in call.stages]
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._split: dict[tuple[int, int], SplitBackward] = {}

    def run_row(self, lane: int, row: Sequence[Action]) -> None:
        """Run a lane's row of the table."""
        for action in row:
            self._call.check(lane)
            with self._call.span(action.stage, action, action.kind):
                self._call.stages[action.stage].at(action, partial(self._run, action))
            self._call.ended(lane)

    def input_gradient(self, spec: InputSpec, tensor: Tensor, rows: Sequence[int]) -> Tensor | None:
        """The gradient of a caller's input, after all lanes; None if there is none."""
        wire = Wire(CALLER, spec.value)
        parts = [self._call.gradient(wire, i) for i in range(self._call.m)]
        if all(part is None for part in parts):
            return None
        if not spec.batched:
            return add_gradients(parts)
        missing = [tensor.new_zeros(n, *tensor.shape[1:]) for n in rows]
        return torch.cat([m if p is None else p for p, m in zip(parts, missing, strict=True)])

    def _run(self, action: Action) -> None:
        j, i = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            self._forward(action)
            if j == self._call.n - 1:
                with self._call.span(j, f"loss {i}", LOSS):
                    self._at_end(i)
        else:
            with without_autocast():
                self._go_back(action)

    def _go_back(self, action: Action) -> None:
        j, i = action.stage, action.microbatch
        compiled = self._call.stages[j].is_compiled
        if action.kind is Kind.WEIGHT:
            if not compiled:
                self._split.pop((j, i)).weight_gradients()
            return
        gradients = [self._call.gradient(wire, i) for wire in self._call.makes[j]]
        if action.kind is Kind.BACKWARD or compiled:
            found = self._backward(j, i, gradients)
        else:
            found = self._input_gradients(j, i, gradients)
        for wire in self._call.wires.reads[j]:
            self._call.send_gradient(wire, j, i, found.get(wire))

    def _forward(self, action: Action) -> None:
        j, i = action.stage, action.microbatch
        call, stage = self._call, self._call.stages[j]
        values = {wire: call.value(wire, j, i) for wire in call.wires.reads[j]}
        random = call.random(j, i)
        slots = {wire: Slot() for wire, (_, gradient) in values.items() if gradient}
        tensors = {wire: tensor.detach() for wire, (tensor, _) in values.items()}
        outputs: Sequence[Tensor]
        if not torch.is_grad_enabled():
            outputs, random = stage.forward(self._arguments(j, tensors), random)
            gradients = [False] * len(outputs)
        elif recomputes(stage.spec, i, call.m):
            replay = Replay(stage, str(action), random)
            outputs, random = replay.first(self._arguments(j, tensors))
            self._pending[j, i] = _Pending(slots, replay=replay, inputs=tensors)
            gradients = stage.gradients(outputs, [wire in slots for wire in call.takes[j]])
        else:
            received = receive(tensors, slots)
            begins = self._begins(j, i, received, slots)
            again = partial(self._again, action)
            outputs, random = stage.forward(self._arguments(j, received), random, again)
            del received
            self._pending[j, i] = _Pending(slots, _edges(outputs), begins)
            gradients = [output.requires_grad for output in outputs]
        call.pass_random(j, i, random)
        for output, wire, gradient in zip(outputs, call.makes[j], gradients, strict=True):
            if wire in call.wires.readers:
                call.send_value(wire, i, output.detach(), gradient)

    def _backward(
        self, j: int, i: int, gradients: list[Tensor | None]
    ) -> dict[Wire, Tensor | None]:
        """The gradients of what the stage received; those of weights are added to theirs."""
        pending = self._graph(j, i)
        roots = [
            (e, g) for e, g in zip(pending.edges, gradients, strict=True) if e and g is not None
        ]
        gradients.clear()
        pending.edges = ()
        if roots:
            self._backwards[j]([edge for edge, _ in roots], [grad for _, grad in roots])
        return {wire: slot.gradient for wire, slot in pending.slots.items()}

    def _input_gradients(
        self, j: int, i: int, gradients: list[Tensor | None]
    ) -> dict[Wire, Tensor | None]:
        """The same, those of weights being left for later."""
        pending = self._graph(j, i)
        split = SplitBackward(pending.edges, gradients, self._backwards[j])
        self._split[j, i] = split
        found = split.input_gradients(list(pending.begins.values()))
        return dict(zip(pending.begins, found, strict=True))

    def _graph(self, j: int, i: int) -> _Pending:
        """What the forward kept, its graph made now if it was not kept."""
        pending = self._pending.pop((j, i))
        if pending.replay is not None and pending.inputs is not None:
            received = receive(pending.inputs, pending.slots)
            pending.begins = self._begins(j, i, received, pending.slots)
            with self._again(Action(j, Kind.FORWARD, i)):
                again = pending.replay.again(self._arguments(j, received))
            pending.edges = _edges(again)
            pending.replay = pending.inputs = None
        return pending

    def _begins(
        self, j: int, i: int, received: Mapping[Wire, Tensor], slots: Iterable[Wire]
    ) -> dict[Wire, GradientEdge]:
        if (j, i) not in self._halved:
            return {}
        return {wire: get_gradient_edge(received[wire]) for wire in slots}

    def _arguments(self, j: int, values: Mapping[Wire, Tensor]) -> list[Tensor]:
        return [values[wire] for wire in self._call.takes[j]]

    def _again(self, forward: Action) -> AbstractContextManager[None]:
        return self._call.span(forward.stage, f"again {forward}", RECOMPUTE)


def _edges(outputs: Sequence[Tensor]) -> list[GradientEdge | None]:
    return [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
