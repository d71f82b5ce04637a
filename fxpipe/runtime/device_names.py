"""What devices are called, and which a name means."""

import re
from collections.abc import Iterable

import torch

from fxpipe.errors import DeviceError
from fxpipe.runtime import virtual
from fxpipe.runtime.stream import Device, Devices

_MOST = 4096  # devices of a pipeline, far more than any has
_NAME = re.compile(r"\s*([a-z]+)(?::(\d+))?(?:/(\d+)(?:#(\d+))?|\*(\d+))?\s*")


def parse_devices(devices: Devices) -> tuple[Device, ...]:
    """The devices that `"cpu*4"`, `"cuda:0,cuda:1"`, `"2"`, `2` or a list of such names.

    `"cuda:0/4"` is one GPU as four devices, and `"cuda:0/4#1"` the second of them. A count means
    that many CUDA devices if there are enough, else that many CPU lanes. Raises DeviceError.
    """
    if isinstance(devices, int):
        return _counted(devices)
    if isinstance(devices, str) and devices.strip().isdecimal():
        return _counted(_count(devices))
    if isinstance(devices, Device):
        devices = [devices]
    if not isinstance(devices, str | Iterable):
        raise DeviceError(f"devices are a count, a text or a list of names, not {devices!r}")
    items = devices.split(",") if isinstance(devices, str) else devices
    found = tuple(device for item in items for device in _named(item))
    _refuse_many(len(found))
    if not found:
        raise DeviceError("the device list is empty: name at least one, as in cpu or cuda:0,cuda:1")
    return found


def count_devices(text: str) -> int:
    """How many devices a text names, whether this machine has them or not. Raises DeviceError."""
    if text.strip().isdecimal():
        count = _count(text)
    else:
        matches = [_matched(item) for item in text.split(",")]
        # A group of a GPU, as in cuda:0/4#1, is one.
        each = (one[5] or (None if one[4] else one[3]) or "1" for one in matches)
        count = sum(map(_count, each))
    _refuse_few(count)
    _refuse_many(count)
    return count


def all_devices() -> tuple[Device, ...]:
    """Every CUDA device of this machine; without one, two CPU lanes, which are as any number."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return _counted(count or 2)


def _counted(count: int) -> tuple[Device, ...]:
    _refuse_few(count)
    _refuse_many(count)
    if torch.cuda.is_available() and torch.cuda.device_count() >= count:
        return tuple(torch.device("cuda", index) for index in range(count))
    return (torch.device("cpu"),) * count


def _refuse_few(count: int) -> None:
    if count < 1:
        raise DeviceError(f"{count} devices: a pipeline needs at least one")


def _refuse_many(count: int) -> None:
    if count > _MOST:
        raise DeviceError(f"more than {_MOST} devices: a pipeline has that many at most")


def _count(digits: str) -> int:
    """A number, or one that is too large anyway: Python reads no more than 4,300 digits."""
    return int(digits.strip()[:4000])


def _matched(item: str | Device) -> re.Match[str]:
    """A name that some machine may have a device of."""
    match = _NAME.fullmatch(str(item))
    if match is None:
        raise DeviceError(
            f"{str(item)!r} is no device: write cpu, cpu*4, cuda:0, cuda:0,cuda:1 or cuda:0/4"
        )
    if match[1] == "cpu" and match[3]:
        raise DeviceError(f"{str(item).strip()!r}: several lanes on the CPU are cpu*{match[3]}")
    if match[1] not in ("cpu", "cuda"):
        raise DeviceError(f"{str(item).strip()!r}: fxpipe runs on cpu and cuda devices")
    return match


def _named(item: str | Device) -> tuple[Device, ...]:
    match = _matched(item)
    kind, index, times = match[1], _count(match[2] or "0"), _count(match[5] or "1")
    if kind == "cpu":
        _refuse_many(times)
        return (torch.device("cpu"),) * times
    n_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= n_cuda:
        raise DeviceError(
            f"{str(item).strip()!r} is not there: this machine has {n_cuda} CUDA devices. "
            "CPU lanes always work, as in cpu*2"
        )
    if match[3]:
        groups = virtual.cut(index, _count(match[3]))
        if match[4] is None:
            return groups
        if int(match[4]) >= len(groups):
            raise DeviceError(f"{str(item).strip()!r}: its groups are #0 to #{len(groups) - 1}")
        return (groups[int(match[4])],)
    return (torch.device("cuda", index),) * times
