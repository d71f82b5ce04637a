"""A message in the place of a gradient that is not there, where the receiver waits for one.

Its first number is a NaN that no arithmetic makes: a signalling one (IEEE 754-2019, section 6.2).
"""

import ctypes

import torch
from torch import Tensor

from fxpipe.errors import StageError

# By dtype, numbers as wide and the bits of such a NaN; of a complex number it is the real part.
_DOUBLE = (ctypes.c_uint64, 0x7FF0_0000_0000_0A35)
_SINGLE = (ctypes.c_uint32, 0x7F80_0A35)
_MARKS = {
    torch.float64: _DOUBLE,
    torch.complex128: _DOUBLE,
    torch.float32: _SINGLE,
    torch.complex64: _SINGLE,
    torch.float16: (ctypes.c_uint16, 0x7C35),
    torch.bfloat16: (ctypes.c_uint16, 0x7F95),
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
        number, bits = _MARKS[tensor.dtype]
        number.from_address(tensor.data_ptr()).value = bits


def is_absent(tensor: Tensor) -> bool:
    """Whether `mark_absent` made it say so."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return False
    number, bits = _MARKS[tensor.dtype]
    return number.from_address(tensor.data_ptr()).value == bits  # torch would take as long as an op
