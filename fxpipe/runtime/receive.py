"""Where a value comes in from elsewhere: the beginning of a graph that catches its gradient."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")

# A graph begins at a tensor that requires grad; this one never gets any.
_PHONY = torch.empty(0, requires_grad=True)


class Slot:
    """Where a received value's gradient arrives."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None


class Receive(torch.autograd.Function):
    """A received value as the beginning of a graph that catches its gradient in a slot.

    It is no leaf, so that in-place ops may follow, and it keeps no reference to the value.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, value: Tensor, slot: Slot) -> Tensor:  # noqa: D102
        ctx.slot = slot
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # noqa: D102
        # A closure may call backward more than once.
        before = ctx.slot.gradient
        ctx.slot.gradient = gradient if before is None else before + gradient
        return None, None, None


def receive(values: Mapping[K, Tensor], slots: Mapping[K, Slot]) -> dict[K, Tensor]:
    """The values again; those that have a slot begin a graph."""
    return {
        key: Receive.apply(_PHONY, value, slots[key]) if key in slots else value  # type: ignore[no-untyped-call]
        for key, value in values.items()
    }
