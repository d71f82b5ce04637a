"""Fork and join: an order among backward computations that no data asks for.

After torchgpipe (section 3.1). `fork` gives, beside its tensors, an empty one, the phony; `join`
takes it in elsewhere. In backward, what came before the fork waits for what came after the join.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def fork(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """The tensors again, and a phony whose gradient their backward waits for.

    No phony comes if none of the tensors has a gradient.
    """
    mask = [tensor.requires_grad for tensor in tensors]
    if not any(mask):
        return list(tensors), None
    *forked, phony = Fork.apply(*(t for t, grad in zip(tensors, mask, strict=True) if grad))  # type: ignore[no-untyped-call]
    return _merge(tensors, mask, forked), phony


def join(tensors: Sequence[Tensor], phony: Tensor) -> list[Tensor]:
    """The tensors again; the phony's gradient comes once all of theirs have come.

    Nothing is joined if none of the tensors has a gradient.
    """
    mask = [tensor.requires_grad for tensor in tensors]
    if not any(mask):
        return list(tensors)
    joined = Join.apply(phony, *(t for t, grad in zip(tensors, mask, strict=True) if grad))  # type: ignore[no-untyped-call]
    return _merge(tensors, mask, joined)


def _merge(
    tensors: Sequence[Tensor], mask: Sequence[bool], changed: Sequence[Tensor]
) -> list[Tensor]:
    replacements = iter(changed)
    return [next(replacements) if new else t for t, new in zip(tensors, mask, strict=True)]


class Fork(torch.autograd.Function):
    """See `fork`. `detach` returns the same memory as no view, so that in-place ops may follow."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        ctx.set_materialize_grads(False)
        phony = torch.empty(0, device=tensors[0].device)
        return *(tensor.detach() for tensor in tensors), phony

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        return grads[:-1]


class Join(torch.autograd.Function):
    """See `join`."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        return None, *grads
