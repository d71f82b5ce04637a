"""The processes as a DeviceMesh, which DTensors are on.

What torch works out for DTensors it keeps, with the mesh, and takes for those on an equal one too.
So there is one mesh, and its groups last, for as long as `torch.distributed` is set up.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_meshes: dict[tuple[Any, str, int, int], DeviceMesh] = {}


def mesh_of(kind: str, dp: int, size: int) -> DeviceMesh:
    """Of dimensions "dp", the replicas, and "pp", for devices of a kind, "cpu" or "cuda".

    The first time all ranks ask for it together.
    """
    key = dist.group.WORLD, kind, dp, size
    if key not in _meshes:
        _meshes[key] = init_device_mesh(kind, (dp, size), mesh_dim_names=("dp", "pp"))
    return _meshes[key]
