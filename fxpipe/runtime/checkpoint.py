"""Recomputation: a stage's forward without a graph, and again, with one, when backward needs it.

After torchgpipe (section 3.3): `Checkpoint` stands where the stage's graph would, `Recompute`
beside it, so that backward runs the forward again before the stage's gradients are asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxpipe.errors import StageError
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.dependency import fork, join
from fxpipe.runtime.manifest import StageSpec
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.recomputing import checkpointing, recomputing, versions
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.swapping import swapped
from fxpipe.runtime.written import Written


def recomputes(stage: StageSpec, microbatch: int, n_microbatches: int) -> bool:
    """Whether the stage's checkpoint mode recomputes this micro-batch."""
    mode = stage.checkpoint
    return mode == "always" or (mode == "except_last" and microbatch < n_microbatches - 1)


class Replayed(Protocol):
    """A forward that can be run twice with equal results."""

    def first(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], RandomStream | None]:
        """The outputs, without a graph, and where its random numbers end."""

    def again(self, inputs: Sequence[Tensor], bound: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The outputs with their graph; `bound` stand in for parameters by one of their names."""

    def gradients(self, outputs: Sequence[Tensor], given: Sequence[bool]) -> list[bool]:
        """Which outputs may have a gradient, where `given` says which inputs have one."""


class Replay:
    """A stage's forward on one micro-batch and what it takes to run it again with equal results.

    That is, besides the inputs: the random numbers it began with, autocast, and the buffers that
    it writes, as they were.
    """

    def __init__(self, stage: Stage, action: str, random: RandomStream | None) -> None:
        self._stage = stage
        self._action = action
        self._random = random
        self._ambient = Ambient.capture()
        self._written = Written(stage.module, stage.spec.mutated_buffers)

    def first(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], RandomStream | None]:
        """The outputs, without a graph. Raises StageError."""
        before = versions(inputs)
        with checkpointing(self._ambient):
            outputs, end = self._stage.at(
                self._action, lambda: self._stage.forward(inputs, self._random)
            )
        for port, was, now in zip(self._stage.inputs, before, versions(inputs), strict=True):
            if was != now:
                raise StageError(
                    f"stage {self._stage.index} writes its input {port.parameter!r} in place, so "
                    f"it can't be computed again: make that op not in-place in "
                    f"{self._stage.spec.file}, or set the stage's checkpoint to never in plan.json"
                )
        return [output.detach() for output in outputs], end

    def gradients(self, outputs: Sequence[Tensor], given: Sequence[bool]) -> list[bool]:
        """Which outputs may have a gradient, where `given` says which inputs have one."""
        return self._stage.gradients(outputs, given)

    def again(
        self, inputs: Sequence[Tensor], bound: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """The outputs with their graph; `bound` stand in for parameters by one of their names."""
        stage = self._stage
        with (
            recomputing(self._ambient),
            # The live buffers hold later micro-batches' values and must not count this one twice.
            self._written.again(),
            swapped(stage.module, "_parameters", stage.by_every_name(bound or {})),
        ):
            outputs, _ = stage.at(
                f"the recomputation of {self._action}", lambda: stage.forward(inputs, self._random)
            )
        return outputs


class _Pass:
    """What Checkpoint and Recompute share of one micro-batch on one stage."""

    def __init__(
        self,
        replay: Replayed,
        n_inputs: int,
        parameters: Sequence[str] | None,
        bound: frozenset[str],
    ) -> None:
        self.replay = replay
        self.random: RandomStream | None = None
        self.n_inputs = n_inputs
        self._parameters = parameters
        self._bound = bound
        self._recomputed: tuple[list[Tensor], tuple[Tensor, ...]] | None = None

    def recompute(self, tensors: Sequence[Tensor]) -> None:
        """Compute the outputs from `tensors`, which are the inputs and then the parameters.

        Raises StageError where gradients shall have a graph: those of the outputs end here.
        """
        if torch.is_grad_enabled():
            raise StageError(
                "gradients of gradients (create_graph=True) don't come through what is computed "
                "again: compile with --checkpoint never, or give GPipe checkpoint='never'"
            )
        inputs = [_leaf(tensor) for tensor in tensors[: self.n_inputs]]
        named = dict(zip(self._parameters or (), tensors[self.n_inputs :], strict=True))
        # A tied parameter's stand-in has a history of its own; a leaf in its place ends the graph.
        # A hook on a parameter runs where its gradient comes to: not here, on the way, as well.
        bound = {
            name: _leaf(tensor)
            for name, tensor in named.items()
            if name in self._bound or tensor._backward_hooks
        }
        outputs = self.replay.again(inputs, bound)
        self._recomputed = [*inputs, *(named | bound).values()], outputs

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of inputs and parameters from those of the outputs."""
        assert self._recomputed is not None
        leaves, outputs = self._recomputed
        self._recomputed = None
        roots = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not roots or not (wanted or self._parameters is None):
            return [None] * len(leaves)
        if self._parameters is None:
            torch.autograd.backward([output for output, _ in roots], [grad for _, grad in roots])
            return [leaf.grad for leaf in leaves]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in roots],
                wanted,
                [grad for _, grad in roots],
                allow_unused=True,
            )
        )
        return [next(found) if leaf.requires_grad else None for leaf in leaves]


def checkpointed(
    replay: Replayed,
    inputs: Sequence[Tensor],
    parameters: Mapping[str, Tensor] | None = None,
    bound: frozenset[str] = frozenset(),
) -> tuple[list[Tensor], RandomStream | None]:
    """The stage's outputs, which will be computed again in backward.

    `parameters` are those that the stage's gradient goes to; `bound` names those of them that
    stand in for a tied parameter of another device. Without `parameters`, as in torchgpipe, the
    gradient goes to the `.grad` of whatever the recomputed graph ends in.
    """
    shared = _Pass(replay, len(inputs), None if parameters is None else tuple(parameters), bound)
    tensors = (*inputs, *(parameters or {}).values())
    # Where parameters are not named, it may be that no tensor here has a gradient.
    root = torch.empty(0, requires_grad=parameters is None)
    outputs: Sequence[Tensor] = Checkpoint.apply(root, shared, *tensors)  # type: ignore[no-untyped-call]
    outputs, phony = fork(outputs)
    if phony is not None:
        outputs = join(outputs, Recompute.apply(phony, shared, *tensors))  # type: ignore[no-untyped-call]
    return list(outputs), shared.random


class Checkpoint(torch.autograd.Function):
    """The stage's forward without a graph; in backward, the gradients of the recomputed one."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, root: Tensor, shared: _Pass, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shared = shared
        outputs, shared.random = shared.replay.first(tensors[: shared.n_inputs])
        given = ctx.needs_input_grad[2 : 2 + shared.n_inputs]
        may = shared.replay.gradients(outputs, given)
        ctx.mark_non_differentiable(*(o for o, one in zip(outputs, may, strict=True) if not one))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        return None, None, *ctx.shared.gradients(grads)


class Recompute(torch.autograd.Function):
    """Nothing in forward; in backward, before Checkpoint's turn, the forward with its graph."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, shared: _Pass, *tensors: Tensor) -> Tensor:  # noqa: D102
        ctx.set_materialize_grads(False)
        ctx.shared = shared
        ctx.save_for_backward(*tensors)
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, grad: None) -> tuple[None, ...]:  # noqa: D102
        ctx.shared.recompute(ctx.saved_tensors)
        return None, None, *(None for _ in ctx.saved_tensors)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
