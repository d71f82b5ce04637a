"""One training step by the schedule table: each lane runs its row, action by action.

Stages share no autograd graph: what a stage receives enters its graph through `Receive`, which
catches the gradient, and each backward is called by the stage's own lane. The loss is computed at
the pipeline's end, after the last stage's forward, and its gradient before that stage's backward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpipe.errors import InputError, StageError
from fxpipe.runtime.call import Call
from fxpipe.runtime.checkpoint import Replay, recomputes
from fxpipe.runtime.manifest import InputSpec
from fxpipe.runtime.microbatch import map_nested
from fxpipe.runtime.portal import CALLER, Wire, add_gradients, source_of
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.structure import Structure, rebuild
from fxpipe.schedule import Action, Kind

LossFn = Callable[[Any, Any], Tensor]

# A graph begins at a tensor that requires grad; this one never gets any.
_PHONY = torch.empty(0, requires_grad=True)


class Slot:
    """Where a received value's gradient arrives."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None


class Receive(torch.autograd.Function):
    """A received value as the beginning of a graph that catches its gradient in a slot.

    It is no leaf, so that in-place ops may follow, and it keeps no reference to the value.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, value: Tensor, slot: Slot) -> Tensor:  # noqa: D102
        ctx.slot = slot
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # noqa: D102
        ctx.slot.gradient = gradient
        return None, None, None


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of micro-batch i: `loss_fn(output, targets[i])`, which counts `weights[i]`."""

    loss_fn: LossFn
    targets: Sequence[Any]
    weights: Sequence[float]
    outputs: Sequence[Wire]
    structure: Structure


@dataclass(slots=True)
class _Pending:
    """What a stage, or the loss, keeps of a micro-batch between forward and backward.

    `edges` are its outputs' places in the graph, without their memory; with recomputation there
    are the replay and its inputs instead. `slots` are those of the inputs that have a gradient.
    """

    slots: Mapping[Wire, Slot]
    edges: Sequence[GradientEdge | None] = ()
    replay: Replay | None = None
    inputs: Mapping[Wire, Tensor] | None = None


class Step:
    """One step; `loss` and `input_gradient` are there once all lanes have ended."""

    def __init__(self, call: Call, objective: Objective) -> None:
        self._losses: list[Tensor | None] = [None] * call.m
        self._call = call
        self._objective = objective
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._input_gradients: dict[tuple[str, int, int], Tensor] = {}

    def run_row(self, lane: int, row: Sequence[Action]) -> None:
        """Run a lane's row of the table."""
        for action in row:
            self._call.check(lane)
            self._call.stages[action.stage].at(str(action), partial(self._run, action))

    def loss(self) -> Tensor:
        """The batch's loss, after all lanes."""
        weighted = [
            loss.reshape(()) * weight
            for loss, weight in zip(self._losses, self._objective.weights, strict=True)
            if loss is not None
        ]
        return torch.stack(weighted).sum()

    def input_gradient(self, spec: InputSpec, tensor: Tensor, rows: Sequence[int]) -> Tensor | None:
        """The gradient of a caller's input, after all lanes; None if there is none."""
        found = self._input_gradients
        parts = [
            add_gradients([found.get((spec.value, j, i)) for j in range(self._call.n + 1)])
            for i in range(self._call.m)
        ]
        if all(part is None for part in parts):
            return None
        if not spec.batched:
            return add_gradients(parts)
        missing = [tensor.new_zeros(n, *tensor.shape[1:]) for n in rows]
        return torch.cat([m if p is None else p for p, m in zip(parts, missing, strict=True)])

    def _run(self, action: Action) -> None:
        j, i, n = action.stage, action.microbatch, self._call.n
        if action.kind is Kind.FORWARD:
            self._forward(action)
            if j == n - 1:
                self._loss(i)
            return
        if j == n - 1:
            loss = self._losses[i]
            assert loss is not None
            self._backward(n, i, [torch.full_like(loss, self._objective.weights[i])])
        wires = [Wire(j, output.value) for output in self._call.stages[j].spec.outputs]
        self._backward(j, i, [self._call.gradient(wire, i) for wire in wires])

    def _forward(self, action: Action) -> None:
        j, i = action.stage, action.microbatch
        call, stage = self._call, self._call.stages[j]
        values = {wire: call.value(wire, j, i) for wire in call.wires.reads[j]}
        random = call.random(j, i)
        slots = {wire: Slot() for wire, (_, gradient) in values.items() if gradient}
        tensors = {wire: tensor.detach() for wire, (tensor, _) in values.items()}
        outputs: Sequence[Tensor]
        if recomputes(stage, i, call.m):
            replay = Replay(stage, str(action), random)
            outputs, random = replay.first(_arguments(stage, tensors))
            self._pending[j, i] = _Pending(slots, replay=replay, inputs=tensors)
            graph = bool(slots) or any(p.requires_grad for p in stage.module.parameters())
            gradients = [graph and output.is_floating_point() for output in outputs]
        else:
            outputs, random = stage.forward(_arguments(stage, _receive(tensors, slots)), random)
            self._pending[j, i] = _Pending(slots, _edges(outputs))
            gradients = [output.requires_grad for output in outputs]
        call.pass_random(j, i, random)
        for output, spec, gradient in zip(outputs, stage.spec.outputs, gradients, strict=True):
            wire = Wire(j, spec.value)
            if wire in call.wires.readers:
                call.send_value(wire, i, output.detach(), gradient)

    def _loss(self, i: int) -> None:
        call, objective = self._call, self._objective
        values = {wire: call.value(wire, call.n, i) for wire in call.wires.reads[call.n]}
        slots = {wire: Slot() for wire, (_, gradient) in values.items() if gradient}
        received = _receive({wire: tensor.detach() for wire, (tensor, _) in values.items()}, slots)
        output = rebuild(objective.structure, [received[wire] for wire in objective.outputs])
        target = _to(objective.targets[i], call.device(call.n))
        try:
            loss = objective.loss_fn(output, target)
        except Exception as error:
            raise StageError(
                f"loss_fn failed on micro-batch {i}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise InputError(
                "loss_fn must return one number with a gradient, the mean over the micro-batch's "
                f"rows; on micro-batch {i} it returned {_described(loss)}"
            )
        self._losses[i] = loss.detach()
        self._pending[call.n, i] = _Pending(slots, _edges([loss]))

    def _backward(self, j: int, i: int, gradients: Sequence[Tensor | None]) -> None:
        call = self._call
        pending = self._pending.pop((j, i))
        edges = pending.edges
        if pending.replay is not None and pending.inputs is not None:
            received = _receive(pending.inputs, pending.slots)
            edges = _edges(pending.replay.again(_arguments(call.stages[j], received)))
            del received
        roots = [(e, g) for e, g in zip(edges, gradients, strict=True) if e and g is not None]
        del edges, gradients
        if roots:
            torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
        del roots
        for wire in call.wires.reads[j]:
            slot = pending.slots.get(wire)
            gradient = slot.gradient if slot else None
            if wire.source != CALLER:
                call.send_gradient(wire, j, i, gradient)
            elif gradient is not None:
                home = call.pieces[i][wire.value].device
                self._input_gradients[wire.value, j, i] = gradient.to(home)


def _arguments(stage: Stage, values: Mapping[Wire, Tensor]) -> list[Tensor]:
    return [values[Wire(source_of(port.source), port.value)] for port in stage.spec.inputs]


def _receive(values: Mapping[Wire, Tensor], slots: Mapping[Wire, Slot]) -> dict[Wire, Tensor]:
    return {
        wire: Receive.apply(_PHONY, value, slots[wire]) if wire in slots else value  # type: ignore[no-untyped-call]
        for wire, value in values.items()
    }


def _edges(outputs: Sequence[Tensor]) -> list[GradientEdge | None]:
    return [get_gradient_edge(output) if output.requires_grad else None for output in outputs]


def _to(target: Any, device: torch.device) -> Any:
    if isinstance(target, Tensor):
        return target.to(device)
    return map_nested(lambda child: _to(child, device), target)


def _described(loss: object) -> str:
    if not isinstance(loss, Tensor):
        return repr(loss)
    without = "" if loss.requires_grad else " without a gradient"
    return f"a tensor of shape {list(loss.shape)}{without}"
