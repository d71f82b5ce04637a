"""What can have a gradient, and `torch.autograd.backward` for gradients that are known to fit.

Its checks of shapes and dtypes take half of a small action's time, and what stages send each other
fits by construction.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def differentiable(tensor: Tensor) -> bool:
    """Whether numbers of its dtype have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_reals(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, in a dimension behind; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def backward(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor] = (),
) -> None:
    """Add what `gradients` of `roots` give to the `.grad` of all leaves, or of these alone.

    The graph is freed.
    """
    _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        False,  # keep no graph
        False,  # make no graph
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=True,
    )
