"""The loss that a package is trained by where it is compared, with the model or a prediction."""

from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime.backward import as_reals
from fxpipe.runtime.structure import describe
from fxpipe.target import Target


def loss_of(target: Target, output: Any, wanted: Any) -> Tensor:
    """The target file's loss; without one, a fixed weighted mean of each output tensor."""
    if target.loss is not None:
        return target.loss(output, wanted)
    return own_loss(output)


def own_loss(output: Any) -> Tensor:
    """A fixed weighted mean of each output tensor. Raises InputError."""
    tensors = [tensor for tensor in describe(output)[1] if tensor.requires_grad]
    if not tensors:
        raise InputError("no output of the model needs a gradient")
    return torch.stack([_weighted_mean(tensor) for tensor in tensors]).sum()


def _weighted_mean(tensor: Tensor) -> Tensor:
    """Over rows a plain mean; within a row weighted, since a sum is constant after a softmax."""
    tensor = as_reals(tensor)
    if tensor.dim() == 0:
        return tensor
    row = tensor[:1]
    weights = torch.arange(row.numel(), dtype=tensor.dtype, device=tensor.device).cos()
    return (tensor * weights.view_as(row)).mean()
