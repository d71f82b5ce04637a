"""All device access: what a CUDA device does with streams, a CPU lane does by doing nothing.

After torchgpipe's `stream.py`. A CPU "stream" is a dummy; every function here takes both kinds, so
the rest of the runtime never asks what device it is on.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fxpipe.errors import DeviceError


class CpuStream:
    """Stands for the order in which a CPU thread works, which needs no help."""


Stream = CpuStream | torch.cuda.Stream
CPU_STREAM = CpuStream()

# A moment: the host's clock in milliseconds, or an event of a CUDA stream.
Mark = float | torch.cuda.Event

Devices = str | int | torch.device | Sequence[str | torch.device]


def parse_devices(devices: Devices) -> tuple[torch.device, ...]:
    """The devices that `"cpu*4"`, `"cuda:0,cuda:1"`, `"2"`, `2` or a list of such names.

    A count means that many CUDA devices if there are enough, else that many CPU lanes. Raises
    DeviceError.
    """
    if isinstance(devices, int) or (isinstance(devices, str) and devices.strip().isdecimal()):
        return _counted(int(devices))
    if isinstance(devices, torch.device):
        devices = [devices]
    if not isinstance(devices, str | Iterable):
        raise DeviceError(f"devices are a count, a text or a list of names, not {devices!r}")
    items = devices.split(",") if isinstance(devices, str) else devices
    found = tuple(device for item in items for device in _named(item))
    if not found:
        raise DeviceError("the device list is empty: name at least one, as in cpu or cuda:0,cuda:1")
    return found


def _counted(count: int) -> tuple[torch.device, ...]:
    if count < 1:
        raise DeviceError(f"{count} devices: a pipeline needs at least one")
    if torch.cuda.is_available() and torch.cuda.device_count() >= count:
        return tuple(torch.device("cuda", index) for index in range(count))
    return (torch.device("cpu"),) * count


def _named(item: str | torch.device) -> tuple[torch.device, ...]:
    match = re.fullmatch(r"\s*([a-z]+)(?::(\d+))?(?:\*(\d+))?\s*", str(item))
    if match is None:
        raise DeviceError(f"{str(item)!r} is no device: write cpu, cpu*4, cuda:0 or cuda:0,cuda:1")
    kind, index, times = match[1], int(match[2] or 0), int(match[3] or 1)
    if kind == "cpu":
        return (torch.device("cpu"),) * times
    if kind != "cuda":
        raise DeviceError(f"{str(item).strip()!r}: fxpipe runs on cpu and cuda devices")
    n_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= n_cuda:
        raise DeviceError(
            f"{str(item).strip()!r} is not there: this machine has {n_cuda} CUDA devices. "
            "CPU lanes always work, as in cpu*2"
        )
    return (torch.device("cuda", index),) * times


def new_stream(device: torch.device) -> Stream:
    """A stream of its own on `device`."""
    return torch.cuda.Stream(device) if device.type == "cuda" else CPU_STREAM  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> Stream:
    """The stream that this thread uses on `device`."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else CPU_STREAM


def cuda_in_use() -> bool:
    """Whether anything has touched a CUDA device yet."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def current_streams() -> list[Stream]:
    """The stream that this thread uses on its current CUDA device, if CUDA is in use."""
    return [torch.cuda.current_stream()] if cuda_in_use() else []


def wait_stream(waiting: Stream, awaited: Stream) -> None:
    """Make what is launched on `waiting` from now on follow what stands on `awaited` now."""
    if isinstance(awaited, CpuStream):
        return
    if isinstance(waiting, CpuStream):
        awaited.synchronize()
    elif waiting != awaited:
        waiting.wait_stream(awaited)


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """Keep the allocator from giving away the tensor's memory before `stream` has read it."""
    if isinstance(stream, CpuStream) or not tensor.is_cuda:
        return
    # A view's storage is the whole one; an alias of the storage's first element marks all of it
    # (pytorch#27366).
    whole = tensor.new_empty([0]).set_(tensor.untyped_storage())
    whole.record_stream(stream)


@contextmanager
def use_streams(streams: Sequence[Stream]) -> Iterator[None]:
    """Make each stream its device's current one, and the first one's device the current device."""
    cuda = [stream for stream in streams if not isinstance(stream, CpuStream)]
    if not cuda:
        yield
        return
    before = torch.cuda.current_device()
    restore = [torch.cuda.current_stream(stream.device) for stream in cuda]
    for stream in reversed(cuda):
        torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        for stream in restore:
            torch.cuda.set_stream(stream)
        torch.cuda.set_device(before)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int | None:
    """What `device` has held at its fullest since `reset_peak_bytes`; None of a CPU lane."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak_bytes(device: torch.device) -> None:
    """Begin to look for the fullest moment."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def mark(on: Stream) -> Mark:
    """This moment on a stream: once all that stands on it now is done."""
    if isinstance(on, CpuStream):
        return 1e3 * time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(on)
    return event


def ms_between(start: Mark, end: Mark) -> float:
    """Milliseconds between two marks of one device, which has passed both."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return float(start.elapsed_time(end))


def generator(device: torch.device) -> torch.Generator:
    """The generator that random ops on `device` draw from."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def threads_per_lane(devices: Sequence[torch.device]) -> int:
    """How many threads each CPU lane's ops may use, so that all lanes together use what one did."""
    lanes = sum(device.type == "cpu" for device in devices)
    return max(1, torch.get_num_threads() // max(1, lanes))


def use_threads(count: int) -> None:
    """Let this thread's ops use `count` threads.

    OpenMP's setting is each thread's own, but a thread's first op takes it from a global that
    `set_num_threads` writes too: ask first, so that the first op is past. Whoever called the lanes
    sets the global back.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)
