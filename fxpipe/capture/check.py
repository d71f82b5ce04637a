"""The numeric check: does the graph compute what the model does? On real data, gradients too.

Tracing can go wrong in silence (a buffer assigned anew, a mode baked in), so every capture is run
against the model at another batch size than the traced one, in train and eval mode.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxpipe.errors import CaptureError
from fxpipe.interpret import untouched

Run = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Result:
    """What one forward and backward gave, by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def observe_run(run: Run, model: nn.Module, state: Mapping[str, Tensor], training: bool) -> Result:
    """Outputs of `run`, gradients of a fixed function of them, and buffers afterwards."""
    with untouched(model, state):
        model.train(training)
        torch.manual_seed(0)
        outputs = run()
        buffers = {
            name: tensor.detach().clone()
            for name, tensor in state.items()
            if not isinstance(tensor, nn.Parameter)
        }
    named = {f"output {k}": output for k, output in enumerate(outputs)}
    gradients = _gradients(outputs, state) if training else {}
    detached = {name: output.detach() for name, output in named.items()}
    return Result(detached, gradients, buffers)


def _gradients(outputs: Sequence[Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    trained = {name: tensor for name, tensor in state.items() if tensor.requires_grad}
    made = [output for output in outputs if output.requires_grad]
    if not trained or not made:
        return {}
    generator = torch.Generator(made[0].device).manual_seed(0)
    weights = [
        torch.rand(output.shape, generator=generator, device=output.device, dtype=output.dtype)
        for output in made
    ]
    found = torch.autograd.grad(made, list(trained.values()), weights, allow_unused=True)
    return {name: grad for name, grad in zip(trained, found, strict=True) if grad is not None}


def compare(expected: Result, found: Result) -> str | None:
    """The first thing in which two results differ, in words; None if they agree."""
    for group in ("outputs", "gradients", "buffers"):
        ours: dict[str, Tensor] = getattr(found, group)
        theirs: dict[str, Tensor] = getattr(expected, group)
        if ours.keys() != theirs.keys():
            return f"{group} of {sorted(ours.keys() ^ theirs.keys())} on one side only"
        scale = max((_size(tensor) for tensor in theirs.values()), default=0.0)
        for name, tensor in theirs.items():
            if ours[name].shape != tensor.shape or ours[name].dtype != tensor.dtype:
                return f"{group[:-1]} {name} is {_shape(ours[name])}, not {_shape(tensor)}"
            distance = _size(ours[name].double() - tensor.double())
            allowed = _tolerance(tensor) * max(_size(tensor), 1e-3 * scale)
            if not distance <= allowed:
                return f"{group[:-1]} {name} differs by {distance:.3g} (allowed {allowed:.3g})"
    return None


def refuse_new_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Raise CaptureError if a forward replaced a buffer, which tracing would drop in silence."""
    for name, tensor in model.named_buffers(remove_duplicate=False):
        if name in before and before[name] is not tensor:
            raise CaptureError(
                f"forward assigns the buffer {name!r} anew, which can't be captured: "
                f"write it in place, as in self.{name.rpartition('.')[2]}.copy_(...)"
            )


def _tolerance(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps ** 0.5 if tensor.is_floating_point() else 0.0


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
