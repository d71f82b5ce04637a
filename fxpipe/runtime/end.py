"""The pipeline's end: outputs are put together there, and their gradients set out from there."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from fxpipe.errors import InputError, StageError
from fxpipe.runtime.ambient import without_autocast
from fxpipe.runtime.backward import backward
from fxpipe.runtime.call import Call
from fxpipe.runtime.microbatch import map_tensors
from fxpipe.runtime.portal import Wire
from fxpipe.runtime.receive import Slot, receive
from fxpipe.runtime.structure import Structure, assemble, imported

LossFn = Callable[[Any, Any], Tensor]


class End:
    """The end of one call, reading `outputs`, from which the model's output is built."""

    def __init__(self, call: Call, outputs: Sequence[Wire], structure: Structure) -> None:
        self._call = call
        self._outputs = outputs
        self._structure = imported(structure)
        self._slots: dict[int, Mapping[Wire, Slot]] = {}

    def output(self, i: int) -> Any:
        """Micro-batch i's output, the beginning of a graph that catches gradients; waits for it."""
        call = self._call
        values = {wire: call.value(wire, call.n, i) for wire in call.wires.reads[call.n]}
        slots = {wire: Slot() for wire, (_, gradient) in values.items() if gradient}
        received = receive({wire: tensor.detach() for wire, (tensor, _) in values.items()}, slots)
        self._slots[i] = slots
        return assemble(self._structure, [received.get(wire) for wire in self._outputs])

    def send_gradients(self, i: int) -> None:
        """Send the gradients that micro-batch i's output got to the stages it came from."""
        slots = self._slots.pop(i)
        for wire in self._call.wires.reads[self._call.n]:
            slot = slots.get(wire)
            self._call.send_gradient(wire, self._call.n, i, slot.gradient if slot else None)


class Objective:
    """The loss of micro-batch i: `loss_fn(output, targets[i])`, which counts `weights[i]`."""

    def __init__(
        self,
        loss_fn: LossFn,
        targets: Sequence[Any],
        weights: Sequence[float],
        end: End,
        scaler: GradScaler | None,
    ) -> None:
        self._loss_fn = loss_fn
        self._targets = targets
        self._weights = weights
        self._end = end
        self._scaler = scaler
        self._losses: list[Tensor | None] = [None] * len(weights)

    def run(self, i: int, device: torch.device) -> None:
        """Compute the loss on `device`, send its gradient back. Raises InputError, StageError."""
        target = map_tensors(lambda tensor: tensor.to(device), self._targets[i])
        loss = taken_loss(self._loss_fn, self._end.output(i), target, i)
        # Not the loss itself: torch's own are numbers in memory as large as the output.
        self._losses[i] = loss.detach().reshape(()) * self._weights[i]
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        with without_autocast():
            backward([scaled], [torch.full_like(scaled, self._weights[i])])
        self._end.send_gradients(i)

    def loss(self) -> Tensor:
        """The batch's loss, after all lanes."""
        return torch.stack([loss for loss in self._losses if loss is not None]).sum()


def taken_loss(loss_fn: LossFn, output: Any, target: Any, i: int) -> Tensor:
    """Micro-batch i's loss. Raises StageError if `loss_fn` fails, InputError if it is none."""
    try:
        loss = loss_fn(output, target)
    except Exception as error:
        raise StageError(
            f"loss_fn failed on micro-batch {i}: {type(error).__name__}: {error}"
        ) from error
    one = isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex()
    if not one or not loss.requires_grad:
        raise InputError(
            "loss_fn must return one number with a gradient, the mean over the micro-batch's "
            f"rows; on micro-batch {i} it returned {_described(loss)}{_frozen(output)}"
        )
    return loss


def _frozen(output: Any) -> str:
    """Says so if no loss of this output could have a gradient."""
    required: list[bool] = []

    def note(tensor: Tensor) -> Tensor:
        required.append(tensor.requires_grad)
        return tensor

    map_tensors(note, output)
    if not required or any(required):
        return ""
    return (
        ". Nor has the output a gradient: no parameter of the pipeline that it depends on requires "
        "one. Call requires_grad_() on what is to be trained"
    )


def _described(loss: object) -> str:
    if loss is None or isinstance(loss, float | int):
        return repr(loss)
    if not isinstance(loss, Tensor):  # of a tuple, such as (loss, logits), the numbers fill pages
        return f"a {type(loss).__name__}"
    dtype = f" {loss.dtype}" if loss.is_complex() else ""
    without = "" if loss.requires_grad else " without a gradient"
    return f"a tensor of shape {list(loss.shape)}{dtype}{without}"
