"""A GradScaler on each rank: what overflowed on one has overflowed on all.

A scaler skips the optimizer's step, and halves its scale, where it finds a gradient that is not
finite. Ranks must do so together: so where one has such a gradient, all get one.
"""

from collections.abc import Sequence

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
    spread_overflow(parameters, ranks)


def spread_overflow(parameters: Sequence[Tensor], ranks: Ranks) -> None:
    """Give each rank a gradient that is not finite if one has such a gradient."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    overflowed = any(not bool(gradient.isfinite().all()) for gradient in gradients)
    if any(ranks.gather_world(overflowed)) and not overflowed and gradients:
        gradients[0].fill_(torch.inf)
