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


class Turns:
    """Makes backward take the micro-batches of one stage in the opposite order of forward.

    Unless `forks`, it leaves the order to autograd.
    """

    def __init__(self, forks: bool = True) -> None:
        self._forks = forks
        self._phony: Tensor | None = None
        self._unjoined: Tensor | None = None

    def begin(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The stage's inputs; their backward comes before that of the micro-batch before."""
        phony, self._phony = self._phony, None
        if phony is None:
            return list(inputs)
        if not any(tensor.requires_grad for tensor in inputs):
            # Token ids and the like have no gradient that could be waited for: then this one's
            # backward begins first at least.
            self._unjoined = phony
            return list(inputs)
        return join(inputs, phony)

    def end(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The stage's outputs; their backward waits for the next micro-batch's."""
        phony, self._unjoined = self._unjoined, None
        if phony is not None:
            outputs = join(outputs, phony)
        if self._forks and torch.is_grad_enabled():
            outputs, self._phony = fork(outputs)
        return list(outputs)


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
