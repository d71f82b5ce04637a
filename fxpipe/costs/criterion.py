"""The loss of one micro-batch by itself, from outputs to their gradients, to be measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpipe.costs.counted import most_bytes
from fxpipe.costs.stopwatch import Clock
from fxpipe.ir import Capture, LossCost
from fxpipe.runtime.end import LossFn, taken_loss
from fxpipe.runtime.leaves import in_mode
from fxpipe.runtime.microbatch import map_tensors, split_target
from fxpipe.runtime.receive import Slot, receive
from fxpipe.runtime.structure import Structure, rebuild

# The model's outputs in order; None for what only eval mode has.
Outputs = Sequence[Tensor | None]


class Loss(NamedTuple):
    """What `pipe.step` is given: the loss, and the targets of a whole batch."""

    loss_fn: LossFn
    target: Any

    @classmethod
    def of(cls, loss_fn: LossFn | None, target: Any) -> "Loss | None":
        """None without a `loss_fn`."""
        return None if loss_fn is None else cls(loss_fn, target)


@dataclass(frozen=True, slots=True)
class Criterion:
    """`loss_fn(output, target)` of the first micro-batch, as the pipeline's end takes it.

    `names[k]` is the value that output k is, and `trained[k]` says whether it has a gradient.
    """

    loss_fn: LossFn
    target: Any
    structure: Structure
    names: tuple[str, ...]
    trained: tuple[bool, ...]

    @classmethod
    def of(cls, capture: Capture, loss: Loss, n_microbatches: int) -> "Criterion":
        """That of `capture` in so many micro-batches."""
        rows = [len(part) for part in torch.empty(capture.batch).tensor_split(n_microbatches)]
        return cls(
            loss.loss_fn,
            split_target(loss.target, rows)[0],
            in_mode(capture.output_structure, training=True),
            tuple(capture.outputs),
            tuple(
                name in capture.specs and capture.specs[name].requires_grad
                for name in capture.outputs
            ),
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Criterion":
        """The same with `move(tensor)` in the place of each tensor of the target."""
        return replace(self, target=map_tensors(move, self.target))

    def gradients(self, outputs: Outputs) -> list[Tensor | None]:
        """Each output's, or None. Raises InputError and StageError as a step does."""
        return self._backward(*self._forward(outputs))

    def _forward(self, outputs: Outputs) -> tuple[Tensor, dict[int, GradientEdge]]:
        """The loss, and by output where its gradient comes out; as in a step, no output is kept."""
        given = {k: output.detach() for k, output in enumerate(outputs) if output is not None}
        slots = {k: Slot() for k in given if self.trained[k]}
        received = receive(given, slots)
        output = rebuild(self.structure, [received.get(k) for k in range(len(self.trained))])
        loss = taken_loss(self.loss_fn, output, self.target, 0)
        return loss, {k: get_gradient_edge(received[k]) for k in slots}

    def _backward(self, loss: Tensor, wanted: Mapping[int, GradientEdge]) -> list[Tensor | None]:
        # Not `backward`: a loss may have parameters of its own.
        found = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True)
        given = dict(zip(wanted, found, strict=True))
        return [given.get(k) for k in range(len(self.trained))]

    def cost(self, outputs: Outputs, clock: Clock, device: torch.device) -> LossCost:
        """What that takes by `clock`, and what is there at its fullest."""
        with torch.enable_grad():
            ms = clock(self.gradients, lambda: outputs)
            found = zip(self.names, self.gradients(outputs), strict=True)
            used = {name for name, gradient in found if gradient is not None}
            trained = dict.fromkeys(compress(self.names, self.trained))
            unused = tuple(name for name in trained if name not in used)

            def of_copies() -> object:
                copies = [
                    output if output is None or name in unused else output.clone()
                    for name, output in zip(self.names, outputs, strict=True)
                ]
                made = self._forward(copies)
                del copies
                return self._backward(*made)

            _, n_bytes = most_bytes(of_copies, device)
        return LossCost(ms, n_bytes, unused)
