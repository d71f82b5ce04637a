"""Values from one device to another, over copy streams that leave the compute streams free.

After torchgpipe (section 3.2). Between lanes of one device nothing is copied: `send` and `receive`
then hand on the very tensor. If they compute on different streams, as virtual devices do, the
reader's waits for the maker's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.runtime import stream
from fxpipe.runtime.memory import Memory
from fxpipe.runtime.recorder import Recorder
from fxpipe.runtime.stream import Device, Stream


@dataclass(frozen=True, slots=True)
class End:
    """One end of a link: a device, the stream it computes on and the one it copies on."""

    device: torch.device
    compute: Stream
    copy: Stream


class Links:
    """The ends of one call: per lane, and per micro-batch a copy stream of its own."""

    recorder: Recorder | None = None
    memory: Memory | None = None

    def __init__(self, devices: Sequence[Device], copies: Sequence[Sequence[Stream]]) -> None:
        self._ends = [
            _ends(stream.place(device), stream.current_stream(device), lane_copies)
            for device, lane_copies in zip(devices, copies, strict=True)
        ]

    def enter(self, tensor: Tensor, lane: int, microbatch: int) -> Tensor:
        """What `lane` gets of the caller's `tensor`; called on that lane."""
        tensor = tensor.to(self._ends[lane][microbatch].device)
        return tensor if self.memory is None else self.memory.entered(tensor, lane)

    def send(self, tensor: Tensor, source: int, target: int, microbatch: int) -> Tensor:
        """Start the way of `tensor` from lane to lane; called on the source's lane."""
        ends = self._ends[source][microbatch], self._ends[target][microbatch]
        if self.memory is not None:
            tensor = self.memory.sent(tensor, source, target)
        if self.recorder is None or ends[0].device == ends[1].device:
            return _send(tensor, *ends)
        stream.wait_stream(ends[0].copy, ends[0].compute)  # which is no part of the copy
        with self.recorder.copying(source, f"{microbatch} to {target}", ends[0].copy):
            return _send(tensor, *ends)

    def receive(self, tensor: Tensor, source: int, target: int, microbatch: int) -> Tensor:
        """End the way of what `send` gave; called on the target's lane."""
        return _receive(tensor, self._ends[source][microbatch], self._ends[target][microbatch])


def compact(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it keeps more memory than its own.

    A concatenation's gradient is one tensor, of which each part gets a view.
    """
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def new_copy_streams(devices: Sequence[Device], n_microbatches: int) -> list[list[Stream]]:
    """A copy stream per lane and micro-batch."""
    return [[stream.new_stream(device) for _ in range(n_microbatches)] for device in devices]


def _ends(device: torch.device, compute: Stream, copies: Sequence[Stream]) -> list[End]:
    ends = {copy: End(device, compute, copy) for copy in copies}  # on the CPU all are one
    return [ends[copy] for copy in copies]


def _send(tensor: Tensor, source: End, target: End) -> Tensor:
    if not _apart(source, target):
        return tensor
    graph = torch.is_grad_enabled() and tensor.requires_grad
    if source.device == target.device and not graph:
        # The copy stream only tells that it is there. The allocator asks for each stream that has
        # read what is freed whether it has come so far, each time that it gives memory.
        stream.wait_stream(source.copy, source.compute)
        return tensor
    waited = _waited(tensor, source.copy, source.compute)
    if source.device == target.device:
        return waited
    if not graph:
        return _copy(waited, source, target)
    return Copy.apply(source, target, waited)  # type: ignore[no-any-return, no-untyped-call]


def _receive(tensor: Tensor, source: End, target: End) -> Tensor:
    if not _apart(source, target):
        return tensor
    # Where nothing is copied, the source's copy stream tells that the tensor is there.
    last = source if source.device == target.device else target
    return _waited(tensor, target.compute, last.copy)


def _apart(source: End, target: End) -> bool:
    return source.device != target.device or source.compute != target.compute


def _waited(tensor: Tensor, waiting: Stream, awaited: Stream) -> Tensor:
    if torch.is_grad_enabled() and tensor.requires_grad:
        return Wait.apply(waiting, awaited, tensor)  # type: ignore[no-any-return, no-untyped-call]
    _wait(tensor, waiting, awaited)
    return tensor


def _wait(tensor: Tensor, waiting: Stream, awaited: Stream) -> None:
    stream.wait_stream(waiting, awaited)
    stream.record_stream(tensor, waiting)


def _copy(tensor: Tensor, source: End, target: End) -> Tensor:
    # Between a CUDA device and the CPU nothing would wait for an asynchronous copy.
    same_kind = source.device.type == target.device.type
    with stream.use_streams([source.copy, target.copy]):
        copied = tensor.to(target.device, non_blocking=same_kind)
    stream.record_stream(tensor, source.copy)
    stream.record_stream(copied, target.copy)
    return copied


class Wait(torch.autograd.Function):
    """`waiting` follows `awaited` in forward, the other way round in backward."""

    @staticmethod
    def forward(ctx: Any, waiting: Stream, awaited: Stream, tensor: Tensor) -> Tensor:  # noqa: D102
        ctx.streams = waiting, awaited
        _wait(tensor, waiting, awaited)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:  # noqa: D102
        waiting, awaited = ctx.streams
        _wait(grad, awaited, waiting)
        return None, None, grad


class Copy(torch.autograd.Function):
    """Copy on the copy streams of both ends; the gradient goes back on them."""

    @staticmethod
    def forward(ctx: Any, source: End, target: End, tensor: Tensor) -> Tensor:  # noqa: D102
        ctx.ends = source, target
        return _copy(tensor, source, target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:  # noqa: D102
        source, target = ctx.ends
        return None, None, _copy(grad, target, source)
