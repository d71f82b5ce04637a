"""A stage as `torch.distributed.pipelining` calls it: its neighbours' tensors in and out, in order.

There a stage sends all that it returns to the next one, and its inputs' gradients to the one
before. It takes them for leaves, and what it sends must be contiguous and no view.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from fxpipe.errors import InputError, StageError
from fxpipe.runtime.portal import Wire, source_of
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.torch_pipelining.crossings import Crossing


class Enter(torch.autograd.Function):
    """Values again, as the beginning of a graph, and an empty tensor that all that leaves hangs on.

    So each gets a gradient, zeros where none comes: the stage before waits for one.
    """

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        return (*(value.detach() for value in values), values[0].new_empty(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        return tuple(gradient.contiguous() for gradient in gradients[:-1])


class Leave(torch.autograd.Function):
    """A value again, contiguous and no view: theirs takes it out of its graph in place."""

    @staticmethod
    def forward(ctx: Any, entered: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        ctx.entered = entered.shape, entered.dtype
        return value.detach().contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        shape, dtype = ctx.entered
        return gradient.new_zeros(shape, dtype=dtype), gradient


class StageModule(nn.Module):
    """A stage's module that takes `takes` and gives `gives`, by position.

    Parameters, buffers and children are those of the stage's own module, under their names: what
    is put in their place here (by FSDP, say) is in place there.
    """

    def __init__(
        self,
        stage: Stage,
        takes: Sequence[Crossing],
        gives: Sequence[Crossing],
        has_eval: bool,
    ) -> None:
        super().__init__()
        self._parameters = stage.module._parameters
        self._buffers = stage.module._buffers
        self._modules = stage.module._modules
        self._non_persistent_buffers_set = stage.module._non_persistent_buffers_set
        self._stage = stage
        self._takes = tuple(takes)
        self._gives = tuple(gives)
        self._has_eval = has_eval

    def forward(self, *values: Tensor, **named: object) -> Tensor | tuple[Tensor, ...]:
        """What the next stage takes; of the last stage, the model's output tensors, each once.

        One tensor is given as it is, several in a tuple. Raises InputError and StageError.
        """
        if named and self._stage.index == 0:
            raise InputError(
                f"stage 0 takes its inputs by position, not as {', '.join(named)}: "
                + ", ".join(crossing.wire.value for crossing in self._takes)
            )
        if not self.training and not self._has_eval:
            raise InputError(
                "in eval mode other values go between this package's stages than in training, or "
                "none are known: evaluate with fxpipe.load, or the original model"
            )
        self._check_shapes(values)
        at_hand, entered = self._entered(values)
        stage = self._stage
        ports = [at_hand[Wire(source_of(port.source), port.value)] for port in stage.inputs]
        made, _ = stage.forward(ports, None)
        for output, tensor in zip(stage.outputs, made, strict=True):
            at_hand[Wire(stage.index, output.value)] = tensor
        given = tuple(self._left(entered, at_hand[c.wire], c) for c in self._gives)
        return given[0] if len(given) == 1 else given

    def train(self, mode: bool = True) -> Self:
        """Switch the stage's own module too."""
        self._stage.module.training = mode
        return super().train(mode)

    def _check_shapes(self, values: Sequence[Tensor]) -> None:
        found = [list(value.shape) for value in values]
        expected = [list(crossing.shape) for crossing in self._takes]
        if found != expected:
            raise InputError(
                f"stage {self._stage.index} was made for inputs of shapes {expected} a "
                f"micro-batch, found {found}: give such batches, or other sizes to "
                "to_torch_pipelining (batch=...)"
            )

    def _entered(self, values: Sequence[Tensor]) -> tuple[dict[Wire, Tensor], Tensor]:
        """The values by wire, and what stands for all of them in the graph."""
        at_hand = {c.wire: value for c, value in zip(self._takes, values, strict=True)}
        wanting = [wire for wire, value in at_hand.items() if value.requires_grad]
        if not wanting:
            return at_hand, torch.empty(0)
        *begun, entered = Enter.apply(*(at_hand[wire] for wire in wanting))  # type: ignore[no-untyped-call]
        return at_hand | dict(zip(wanting, begun, strict=True)), entered

    def _left(self, entered: Tensor, value: Tensor, crossing: Crossing) -> Tensor:
        # Where no gradients are computed, none are missed.
        wants = value.requires_grad if torch.is_grad_enabled() else crossing.requires_grad
        found = Crossing(crossing.wire, tuple(value.shape), value.dtype, wants)
        if (found.shape, found.dtype) != (crossing.shape, crossing.dtype):
            raise StageError(
                f"stage {self._stage.index} gives {found}, its neighbours were told of {crossing}: "
                "give to_torch_pipelining the dtype that floats between stages have (dtype=...), "
                "or compile again"
            )
        if wants and not crossing.requires_grad:
            raise StageError(
                f"stage {self._stage.index} gives {found}, which it had not when it was compiled, "
                "so that none would come back: freeze no fewer of the parameters than then, give "
                "inputs that require no gradient, or compile again"
            )
        if value.requires_grad:
            return Leave.apply(entered, value)  # type: ignore[no-untyped-call,no-any-return]
        return value.detach().contiguous()


class TorchStage(PipelineStage):
    """A `PipelineStage` that refuses to divide gradients which other stages add to as well."""

    def __init__(
        self,
        module: StageModule,
        n_stages: int,
        tied: Sequence[str],
        group: dist.ProcessGroup | None,
    ) -> None:
        """`tied` are the parameters that other stages have too."""
        stage = module._stage
        super().__init__(
            module,
            stage.index,
            n_stages,
            stage.device,
            tuple(crossing.example() for crossing in module._takes),
            tuple(crossing.example() for crossing in module._gives),
            group=group,
        )
        self._tied = tied

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide gradients, as theirs does. Raises StageError where one is tied."""
        if self._tied and grad_scale_factor != 1:
            raise StageError(
                f"several stages of this rank add to the gradient of {', '.join(self._tied)}, and "
                "each would divide it: take the schedule that to_torch_pipelining gives, or make "
                "yours with scale_grads=False and divide the loss"
            )
        super().scale_grads(grad_scale_factor)
