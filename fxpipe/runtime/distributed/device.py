"""A process's one device: it must be there, no other process's, and what its backend carries."""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxpipe.errors import DeviceError
from fxpipe.runtime.device_names import parse_devices
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.stream import Devices, capacities


def device_of(manifest: Manifest, devices: Devices | None, rank: int) -> torch.device:
    """What `devices` names, or else what the package was compiled for. Raises DeviceError.

    Of a host's GPUs each process has the one that its `LOCAL_RANK` says.
    """
    if devices is None:
        planned = manifest.devices[rank]
        local = os.environ.get("LOCAL_RANK", str(rank))
        devices = f"cuda:{local}" if planned.startswith("cuda") else planned
    found = parse_devices(devices)
    if len(found) != 1:
        raise DeviceError(f"each process runs on one device, {len(found)} were given")
    (device,) = found
    if not isinstance(device, torch.device):
        raise DeviceError(
            f"each process runs on a whole device, {device} is a part of one: give "
            "devices='cpu', or load the package in one process"
        )
    if device.type == "cuda" and not dist.is_nccl_available():
        raise DeviceError(
            f"processes on GPUs, as this one on {device}, speak by NCCL, which this torch was "
            "built without: give devices='cpu', or load the package in one process"
        )
    return device


def refuse_backend(config: str, device: torch.device) -> None:
    """Raise DeviceError unless backends as in "cpu:gloo,cuda:nccl" carry what is on `device`."""
    backends = dict(part.split(":") for part in config.split(","))
    if device.type not in backends:
        raise DeviceError(
            f"torch.distributed was set up with {', '.join(backends.values())}, which carries "
            f"tensors on {', '.join(backends)}; this process's are on {device.type}: give "
            "init_process_group a backend for them, or leave it to load"
        )


def room_bytes(device: torch.device, n_processes: int) -> int:
    """What a process on `device` can hold, of so many on its host: they share the CPU's memory."""
    return capacities([device] * (n_processes if device.type == "cpu" else 1))[0]


def refuse_shared(hardware: Sequence[str | None]) -> None:
    """Raise DeviceError if two ranks, in whose order they are, have one device.

    None is a CPU, which they may share.
    """
    for rank, mine in enumerate(hardware):
        if mine is not None and mine in hardware[:rank]:
            raise DeviceError(
                f"ranks {hardware.index(mine)} and {rank} both run on {mine}: give each process a "
                "device of its own, as devices=f\"cuda:{os.environ['LOCAL_RANK']}\""
            )
