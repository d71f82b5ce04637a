"""`torch.distributed.pipeline.sync.utils`."""

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["partition_model"]


def partition_model(
    module: nn.Sequential,
    balance: Sequence[int],
    devices: Sequence[torch.device | int | str] | None = None,
) -> nn.Sequential:
    """A Sequential of Sequentials, of `balance[j]` layers each, on `devices[j]` (CUDA device j).

    Raises ValueError if there are not as many layers, or devices.
    """
    places = range(len(balance)) if devices is None else devices
    if sum(balance) != len(module) or len(places) != len(balance):
        raise ValueError(
            f"balance {list(balance)} does not fit {len(module)} layers and {len(places)} devices"
        )
    layers = iter(module)
    parts = [nn.Sequential(*(next(layers) for _ in range(n))) for n in balance]
    return nn.Sequential(*(part.to(at) for part, at in zip(parts, places, strict=True)))
