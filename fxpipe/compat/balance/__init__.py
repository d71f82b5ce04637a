"""How many layers to a partition, by what each layer takes: `torchgpipe.balance`."""

import torch
from torch import Tensor, nn

from fxpipe.compat.balance import blockpartition
from fxpipe.compat.balance.profile import profile_sizes, profile_times

__all__ = ["balance_by_size", "balance_by_time"]

Device = torch.device | int | str


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Tensor | tuple[Tensor, ...],
    *,
    timeout: float = 1.0,
    device: Device = "cuda",
) -> list[int]:
    """The number of layers in each partition, so that the slowest one takes least time.

    Forward and backward of each layer on `sample` are run on `device` again and again for
    `timeout` seconds. Raises ValueError if a parameter has a gradient.
    """
    return _lengths(profile_times(module, sample, timeout, torch.device(device)), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Tensor | tuple[Tensor, ...],
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = "cuda",
) -> list[int]:
    """The number of layers in each partition, so that the fullest one takes least memory.

    Counted are what a layer's forward leaves in memory for a micro-batch of `input`, which is a
    mini-batch of `chunks`, and `param_scale` times its parameters: 2 for plain SGD, 3 with
    momentum, 4 for Adam. Raises ValueError if `device` is no CUDA device.
    """
    sizes = profile_sizes(module, input, chunks, param_scale, torch.device(device))
    return _lengths(sizes, partitions)


def _lengths(costs: list[int], partitions: int) -> list[int]:
    return [len(block) for block in blockpartition.solve(costs, partitions)]
