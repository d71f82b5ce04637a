"""`torch.distributed.pipeline.sync.utils`."""

from collections.abc import Iterable, Sequence
from itertools import count, islice

import torch
from torch import nn

__all__ = ["partition_model"]


def partition_model(
    module: nn.Sequential,
    balance: Iterable[int],
    devices: Sequence[torch.device | int | str] | None = None,
) -> nn.Sequential:
    """A Sequential of Sequentials, of `balance[j]` layers each, on `devices[j]` (CUDA device j)."""
    layers = iter(module)
    parts = zip(balance, count() if devices is None else devices, strict=False)
    return nn.Sequential(*(nn.Sequential(*islice(layers, n)).to(device) for n, device in parts))
