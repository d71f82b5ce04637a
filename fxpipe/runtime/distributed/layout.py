"""What a message is, besides its shape: known to both ends, or told in a header before it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpipe.runtime.distributed.messages import Message

# A header's numbers: how many follow; if any do, a dtype, a truth value, and sizes and order of the
# dims, of which torch allows 64.
HEADER_SIZE = 3 + 2 * 64
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """What is known of a message: its dtype, whether the value has a gradient, how it lies.

    `order` are its dims from the one with the largest stride on, which is the order in which it is
    sent: what draws random numbers like it, or convolves it, does so in that order. The place that
    `short` dims have in it, of one item or none, says nothing of longer ones.
    """

    dtype: torch.dtype
    gradient: bool
    order: tuple[int, ...]
    short: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, gradient: bool) -> "Layout":
        """That of this tensor, made dense if it is not, as `torch.empty_like` makes it."""
        strides = torch.empty_like(tensor, device="meta").stride()
        order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        return cls(tensor.dtype, gradient, tuple(order), _short(tensor.shape))

    def holds_for(self, shape: Sequence[int]) -> bool:
        """Whether a message of this shape lies so too."""
        return set(self.short) <= set(_short(shape))

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} with a gradient" if self.gradient else dtype

    def empty(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Memory for such a message."""
        return torch.empty_permuted(shape, self.order, dtype=self.dtype, device=device)


# None: there was no gradient to send.
Layouts = Mapping[Message, Layout | None]


def header_of(layout: Layout | None, shape: Sequence[int]) -> Tensor:
    """The numbers that tell of a message, or, without a layout, that there is nothing."""
    told: list[int] = []
    if layout is not None:
        told = [DTYPES.index(layout.dtype), layout.gradient, *shape, *layout.order]
    header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
    header[: 1 + len(told)] = torch.tensor([len(told), *told])
    return header


def read_header(header: Tensor) -> tuple[Layout | None, Sequence[int]]:
    """What `header_of` was given."""
    n, *told = header.tolist()
    if not n:
        return None, ()
    dtype, gradient, *dims = told[:n]
    shape, order = dims[: len(dims) // 2], dims[len(dims) // 2 :]
    return Layout(DTYPES[dtype], bool(gradient), tuple(order), _short(shape)), shape


def _short(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim for dim, size in enumerate(shape) if size < 2)
