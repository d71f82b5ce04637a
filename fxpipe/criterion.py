"""The loss of one micro-batch by itself, from outputs to their gradients, to be measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.counted import most_bytes
from fxpipe.ir import Capture, LossCost
from fxpipe.runtime.end import LossFn, taken_loss
from fxpipe.runtime.leaves import in_mode
from fxpipe.runtime.microbatch import map_tensors, split_target
from fxpipe.runtime.structure import Structure, rebuild
from fxpipe.stopwatch import Clock

# The model's outputs in order; None for what only eval mode has.
Outputs = Sequence[Tensor | None]


@dataclass(frozen=True, slots=True)
class Criterion:
    """`loss_fn(output, target)` of the first micro-batch, as the pipeline's end takes it.

    `trained[k]` says whether output k has a gradient.
    """

    loss_fn: LossFn
    target: Any
    structure: Structure
    trained: tuple[bool, ...]

    @classmethod
    def of(cls, capture: Capture, loss_fn: LossFn, target: Any, n_microbatches: int) -> "Criterion":
        """That of `capture` in so many micro-batches; `target` is the whole batch's."""
        rows = [len(part) for part in torch.empty(capture.batch).tensor_split(n_microbatches)]
        return cls(
            loss_fn,
            split_target(target, rows)[0],
            in_mode(capture.output_structure, training=True),
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
        leaves = [
            None if output is None else output.detach().requires_grad_(trained)
            for output, trained in zip(outputs, self.trained, strict=True)
        ]
        loss = taken_loss(self.loss_fn, rebuild(self.structure, leaves), self.target, 0)
        # Not `backward`: a loss may have parameters of its own.
        wanted = {k: leaf for k, leaf in enumerate(leaves) if leaf is not None and self.trained[k]}
        found = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True)
        given = dict(zip(wanted, found, strict=True))
        return [given.get(k) for k in range(len(leaves))]

    def cost(self, outputs: Outputs, clock: Clock, device: torch.device) -> LossCost:
        """What that takes by `clock`, and makes at its fullest."""
        with torch.enable_grad():
            ms = clock(self.gradients, lambda: outputs)
            _, n_bytes = most_bytes(lambda: self.gradients(outputs), device)
        return LossCost(ms, n_bytes)
