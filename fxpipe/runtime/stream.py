"""Access to devices: what a CUDA device does with streams, a CPU lane does by doing nothing.

After torchgpipe's `stream.py`. A CPU "stream" is a dummy; every function here takes both kinds, so
the rest of the runtime never asks what device it is on.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from fxpipe.runtime import virtual
from fxpipe.runtime.virtual import VirtualDevice

T = TypeVar("T")


class CpuStream:
    """Stands for the order in which a CPU thread works, which needs no help."""


Stream = CpuStream | torch.cuda.Stream
CPU_STREAM = CpuStream()

# No GPU's clock is faster; of private `torch.cuda._sleep`.
_CYCLES_PER_MS = 3_000_000

# A moment: the host's clock in milliseconds, or an event of a CUDA stream.
Mark = float | torch.cuda.Event

Device = torch.device | VirtualDevice
Devices = str | int | Device | Sequence[str | Device]


def place(device: Device) -> torch.device:
    """Where the tensors of a lane on `device` are."""
    return device.place if isinstance(device, VirtualDevice) else device


def hardware(device: Device) -> str | None:
    """The name that a GPU alone has, whatever processes call it; None of a CPU."""
    where = place(device)
    if where.type == "cpu":
        return None
    properties = torch.cuda.get_device_properties(where)
    return f"{properties.name} {properties.uuid}"


def new_stream(device: Device) -> Stream:
    """A stream of its own on `device`."""
    if isinstance(device, VirtualDevice):
        return virtual.new_stream(device)
    return torch.cuda.Stream(device) if device.type == "cuda" else CPU_STREAM  # type: ignore[no-untyped-call]


def current_stream(device: Device) -> Stream:
    """The stream that this thread uses on `device`; a virtual device has one for all threads."""
    if isinstance(device, VirtualDevice):
        return virtual.compute_stream(device)
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


@contextmanager
def joined(devices: Sequence[Device]) -> Iterator[None]:
    """What the block launches on the devices follows what this thread has launched before.

    What this thread launches afterwards follows the block. Only a virtual device's stream is
    another than this thread's.
    """
    pairs = [(current_stream(device), current_stream(place(device))) for device in devices]
    for own, callers in pairs:
        wait_stream(own, callers)
    try:
        yield
    finally:
        for own, callers in pairs:
            wait_stream(callers, own)


def synchronize(device: Device) -> None:
    """Wait until `device` has done all that was asked of it."""
    if place(device).type == "cuda":
        torch.cuda.synchronize(place(device))


def capacities(devices: Sequence[Device]) -> list[int]:
    """Bytes that each device can hold; those on one machine's or GPU's memory share it."""
    places = [place(device) for device in devices]
    return [_whole_bytes(where) // places.count(where) for where in places]


def _whole_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        # The rest is its context's and other processes'.
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes(device: Device) -> int | None:
    """What `device` has held at its fullest since `reset_peak_bytes`; None of a CPU lane."""
    where = place(device)
    return torch.cuda.max_memory_allocated(where) if where.type == "cuda" else None


def reset_peak_bytes(device: Device) -> None:
    """Begin to look for the fullest moment."""
    if place(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(place(device))


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


def hold_up(on: Stream, ms: float) -> None:
    """Let what is launched on a CUDA stream from now on begin some milliseconds later, or more."""
    if not isinstance(on, CpuStream):
        with torch.cuda.stream(on):
            torch.cuda._sleep(int(ms * _CYCLES_PER_MS))  # type: ignore[no-untyped-call]


def generator(device: torch.device) -> torch.Generator:
    """The generator that random ops on `device` draw from."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def threads_per_lane(devices: Sequence[Device]) -> int:
    """How many threads each lane's ops may use: CPU lanes one each, a lane alone all.

    So a lane is as fast on any number of cores, as devices are, as long as each lane has one.
    """
    lanes = sum(place(device).type == "cpu" for device in devices)
    return 1 if lanes > 1 else torch.get_num_threads()


def use_context(of: Stream) -> None:
    """Give this thread the context of the stream's device, which cuBLAS warns that it lacks."""
    if not isinstance(of, CpuStream):
        of.query()


def use_threads(count: int) -> None:
    """Let this thread's ops use `count` threads.

    OpenMP's setting is each thread's own, but a thread's first op takes it from a global that
    `set_num_threads` writes too: ask first, so that the first op is past. Whoever called the lanes
    sets the global back.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)
