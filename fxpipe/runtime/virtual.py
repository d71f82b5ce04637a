"""One GPU as several devices: disjoint groups of its multiprocessors (SMs), by `cuda.bindings`.

A group is a green context of CUDA's driver: what is launched on its streams runs on its SMs alone.
The groups share the GPU's memory, so that nothing is copied between them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any

import torch

from fxpipe.errors import DeviceError


@dataclass(frozen=True, slots=True)
class VirtualDevice:
    """Group `index` of the `of` equal groups of SMs that CUDA device `gpu` is cut into."""

    gpu: int
    of: int
    index: int

    @property
    def place(self) -> torch.device:
        """The GPU it is a part of."""
        return torch.device("cuda", self.gpu)

    def __str__(self) -> str:
        return f"cuda:{self.gpu}/{self.of}#{self.index}"


def cut(gpu: int, of: int) -> tuple[VirtualDevice, ...]:
    """GPU `gpu` as `of` devices. Raises DeviceError if it can't be cut into so many."""
    if of < 1:
        raise DeviceError(f"cuda:{gpu}/{of}: a GPU is cut into one group of SMs at least")
    _contexts(gpu, of)
    return tuple(VirtualDevice(gpu, of, index) for index in range(of))


def compute_stream(device: VirtualDevice) -> torch.cuda.Stream:
    """The stream that a lane on `device` computes on: one for the process."""
    return _stream(device, 0)


def new_stream(device: VirtualDevice) -> torch.cuda.Stream:
    """A further stream on the device's SMs; after 32 they come again, as torch's own do."""
    return _stream(device, next(_numbers(device)))


@cache
def _numbers(device: VirtualDevice) -> Iterator[int]:
    return cycle(range(1, 33))


@cache
def _stream(device: VirtualDevice, number: int) -> torch.cuda.Stream:
    driver = _driver()
    context = _contexts(device.gpu, device.of)[device.index]
    flags, priority = driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0
    (stream,) = _asked(driver.cuGreenCtxStreamCreate, context, flags, priority)
    return torch.cuda.ExternalStream(int(stream), device.place)  # type: ignore[no-untyped-call]


@cache
def _contexts(gpu: int, of: int) -> list[Any]:
    """The green contexts of all groups, which are split off at once: so they are disjoint."""
    driver = _driver()
    # The contexts rest on the GPU's primary one, which this makes.
    torch.cuda.synchronize(gpu)
    (device,) = _asked(driver.cuDeviceGet, gpu)
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    (whole,) = _asked(driver.cuDeviceGetDevResource, device, kind)
    n_sms = group_size(gpu, whole.sm.smCount, of)
    groups, _, _ = _asked(driver.cuDevSmResourceSplitByCount, of, whole, 0, n_sms)
    if len(groups) != of:
        raise DeviceError(
            f"cuda:{gpu}/{of}: the driver cuts its {whole.sm.smCount} SMs into {len(groups)} "
            f"groups of {n_sms} only: ask for cuda:{gpu}/{len(groups)}"
        )
    contexts = []
    for group in groups:
        (described,) = _asked(driver.cuDevResourceGenerateDesc, [group], 1)
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        (context,) = _asked(driver.cuGreenCtxCreate, described, device, flags)
        contexts.append(context)
    return contexts


def group_size(gpu: int, n_sms: int, of: int) -> int:
    """SMs of each of `of` groups, as many as the chip's granularity allows. Raises DeviceError.

    Source: the CUDA driver API's page on green contexts.
    """
    major, _ = torch.cuda.get_device_capability(gpu)
    least = 1 if major < 7 else 2 if major < 8 else 4 if major < 9 else 8
    step = 1 if major < 7 else 2 if major < 9 else 8
    size = n_sms // of // step * step
    if size < least:
        raise DeviceError(
            f"cuda:{gpu}/{of}: this GPU has {n_sms} SMs, and a group has {least} at least: ask for "
            f"cuda:{gpu}/{n_sms // least} at most"
        )
    return size


def _asked(function: Callable[..., tuple[Any, ...]], *args: object) -> tuple[Any, ...]:
    """What a function of the driver gives. Raises DeviceError with the driver's word."""
    error, *values = function(*args)
    if error:
        raise DeviceError(f"the GPU can't be cut: {function.__name__} says {error!r}")
    return tuple(values)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            "a GPU is cut through cuda.bindings, which is not installed: "
            "pip install 'fxpipe[virtual]'"
        ) from error
    return driver
