"""A GradScaler on each rank: what overflowed on one has overflowed on all.

A scaler skips an optimizer's step, and halves its scale, where it finds a gradient that is not
finite. Ranks must do so together, and none knows which optimizers others have: so where one has
such a gradient, no gradient of any is finite, and all optimizers skip the step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.amp import GradScaler

from fxpipe.runtime.distributed.dtensors import local
from fxpipe.runtime.distributed.ranks import Ranks


def share_overflow(scaler: GradScaler, parameters: Sequence[Tensor], ranks: Ranks) -> None:
    """After a step whose loss `scaler` has scaled where the last stage is."""
    # Where it scaled no loss it doesn't know yet that it is used.
    with_gradients = [p.device for p in parameters if p.grad is not None]
    scaler.scale(torch.zeros((), device=with_gradients[0] if with_gradients else None))
    overflowed = spread_overflow(parameters, ranks)
    scaler._unscale_grads_ = partial(_unscaled, scaler, overflowed)  # type: ignore[method-assign]


@contextmanager
def watched_scalers() -> Iterator[list[GradScaler]]:
    """Gives those that scale a loss in the block: a closure's is not known otherwise."""
    found: list[GradScaler] = []
    scale = GradScaler.scale

    @wraps(scale)
    def noted(self: GradScaler, outputs: Any) -> Any:
        found.extend([self] if self.is_enabled() else [])
        return scale(self, outputs)

    with patch.object(GradScaler, "scale", noted):
        yield found


def spread_overflow(parameters: Sequence[Tensor], ranks: Ranks) -> bool:
    """Whether a rank has a gradient that is not finite; then none is."""
    gradients = [_numbers(local(p.grad)) for p in parameters if p.grad is not None]
    here = any(not bool(gradient.isfinite().all()) for gradient in gradients)
    overflowed = any(ranks.gather_world(here))
    if overflowed:
        for gradient in gradients:
            gradient.fill_(torch.inf)
    return overflowed


def _numbers(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _unscaled(
    scaler: GradScaler,
    overflowed: bool,
    optimizer: torch.optim.Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    """What the scaler's own function gives; of an optimizer without gradients here, what ranks say.

    The scaler would refuse such an optimizer, whose gradients may be on other ranks. Private to
    torch: tests/test_private.py.
    """
    unscale = type(scaler)._unscale_grads_
    found = unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    return found or {found_inf.device: found_inf.fill_(float(overflowed))}
