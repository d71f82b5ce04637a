"""A message in the place of a gradient that is not there, where the receiver waits for one.

Its first number is a NaN that no arithmetic makes: a signalling one (IEEE 754-2019, section 6.2).
"""

import torch
from torch import Tensor

from fxpipe.errors import StageError

# By dtype, integers as wide and the bits of such a NaN.
_MARKS = {
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0A35),
    torch.float32: (torch.int32, 0x7F80_0A35),
    torch.float16: (torch.int16, 0x7C35),
    torch.bfloat16: (torch.int16, 0x7F95),
}


def mark_absent(tensor: Tensor, what: str) -> None:
    """Make `tensor` say that `what` is not there. Raises StageError on a device other than the CPU.

    There a receiver would have to wait for the device to look at each message.
    """
    if tensor.device.type != "cpu":
        raise StageError(
            f"{what} was there in earlier steps and is not in this one: let the loss use each "
            "output in every step, if only as 0 * output.sum(), or give steps that leave one out a "
            "loss function of their own"
        )
    if tensor.numel():
        first, bits = _first(tensor)
        first.fill_(bits)


def is_absent(tensor: Tensor) -> bool:
    """Whether `mark_absent` made it say so."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return False
    first, bits = _first(tensor)
    return int(first) == bits


def _first(tensor: Tensor) -> tuple[Tensor, int]:
    """The bits of its first number, as an integer, and those of the mark."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integer, bits = _MARKS[real.dtype]
    return real[(0,) * real.dim()].view(integer), bits
