"""Tensors and models in another precision, complex numbers too.

`model.to(torch.float64)` would leave of complex weights their real part.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

_Model = TypeVar("_Model", bound=nn.Module)


def in_precision(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Real numbers in `dtype`, complex ones as pairs of it; other tensors as they are."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def set_precision(model: _Model, dtype: torch.dtype) -> _Model:
    """The model itself, its parameters and buffers in this precision."""
    model._apply(lambda tensor: in_precision(tensor, dtype))  # type: ignore[no-untyped-call]
    return model
