"""The values that parameters and buffers begin with, as code."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.memory import is_fake


def initial_values(tensor: Tensor, sizes: Sequence[Any]) -> str:
    """Values like those the model began with: all equal, or normal with their deviation.

    Where those are not known: a vector is a norm's scale most often, anything else is a weight.
    """
    if is_fake(tensor) and tensor.dim() == 1:
        return filled("ones", tensor, sizes)
    if is_fake(tensor):
        return f"{filled('randn', tensor, sizes)} * 0.02"
    flat = tensor.detach().flatten()
    if flat.numel() == 0 or not tensor.is_floating_point():
        return filled("zeros", tensor, sizes)
    first = float(flat[0])
    if bool((flat == first).all()):
        if first in (0.0, 1.0):
            return filled("ones" if first else "zeros", tensor, sizes)
        return f"{filled('ones', tensor, sizes)} * {first:.6g}"
    deviation = f"{float(flat.double().std()):.1g}"
    values = filled("randn", tensor, sizes)
    return values if deviation == "1" else f"{values} * {deviation}"


def filled(kind: str, tensor: Tensor, sizes: Sequence[Any]) -> str:
    """`torch.zeros(3, 4)` for kind "zeros", in the dtype of `tensor`."""
    shape = ", ".join(map(repr, sizes)) or "()"
    dtype = "" if tensor.dtype == torch.float32 else f", dtype={tensor.dtype}"
    return f"torch.{kind}({shape}{dtype})"
