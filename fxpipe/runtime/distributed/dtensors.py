"""Tensors of which a process may hold a share: what of them is here."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import empty as empty_dtensor


def local(tensor: Tensor) -> Tensor:
    """What of it is here, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_cut(tensor: Tensor) -> bool:
    """Whether other replicas hold other parts of it."""
    return isinstance(tensor, DTensor) and not isinstance(tensor.placements[0], Replicate)


def share_of(held: Tensor, given: Tensor) -> Tensor:
    """`given` as this process holds `held`: its share of it, or the whole.

    Where a share was given and the whole is held, all that have one call it together.
    """
    if isinstance(held, DTensor) and not isinstance(given, DTensor):
        # Each has the whole at hand: nothing is sent.
        return distribute_tensor(given, held.device_mesh, held.placements, src_data_rank=None)
    return given if isinstance(held, DTensor) else whole(given)


def whole(tensor: Tensor) -> Tensor:
    """All of it; those that hold a share call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shared_like(held: Tensor, part: Tensor) -> Tensor:
    """The tensor of which `part` is here, as `local(held)` is of `held`."""
    if not isinstance(held, DTensor):
        return part
    mesh, placements, stride = held.device_mesh, held.placements, held.stride()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=held.shape, stride=stride
    )


def broadcast(tensor: Tensor, group: Any, source: int) -> None:
    """Give what is here of a tensor the values that member `source` of `group` has."""
    here = local(tensor.detach())
    values = here.contiguous()  # gloo sends memory as it lies, and takes it so
    dist.broadcast(values, group=group, group_src=source)
    here.copy_(values)


def empty_beside(parameter: Tensor | None, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room for something of `parameter`'s, if of any, cut as it is if it has the same shape."""
    if isinstance(parameter, DTensor) and tuple(size) == tuple(parameter.shape):
        mesh, placements = parameter.device_mesh, parameter.placements
        return empty_dtensor(size, dtype=dtype, device_mesh=mesh, placements=placements)
    return torch.empty(size, dtype=dtype)
