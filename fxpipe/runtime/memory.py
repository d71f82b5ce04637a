"""What each device holds at its fullest: as predicted, and as measured while steps run.

A CUDA device's allocator tells. On the CPU every tensor is counted that a lane's ops make, from
then until its memory is let go of, beside the parameters, gradients and buffers of the lane's
stages. Meanwhile what a lane gets from another, or from the caller, is copied, as between devices,
so that each lane holds what a device in its place would.
"""

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.runtime import stream
from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.stream import Device

Job = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Peak:
    """A device's fullest moment of a step, in bytes. `lanes`, of the package, run on it."""

    device: str
    lanes: tuple[int, ...]
    predicted_bytes: int
    measured_bytes: int | None

    def __str__(self) -> str:
        lanes = f"lane{'s' * (len(self.lanes) > 1)} {', '.join(map(str, self.lanes))}"
        told = f"{lanes} on {self.device}: predicted {_mib(self.predicted_bytes)}"
        return told + (
            "" if self.measured_bytes is None else f", measured {_mib(self.measured_bytes)}"
        )


class Memory:
    """`peaks` has a `Peak` for each device; as a context, it measures what runs in the block.

    Lanes of one CUDA device share its memory: what is predicted of it is what they hold together as
    the host launches their ops, whichever run at once.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        estimate: EstimateSpec,
        stages: Sequence[Stage],
        count: Callable[["Memory | None"], None],
        first_lane: int,
    ) -> None:
        """`count` is told what is to count the lanes' jobs, and at last that nothing is.

        `first_lane` is the number that the package gives the first of `devices`.
        """
        self._count = count
        self._first_lane = first_lane
        self._devices = tuple(devices)
        self._estimate = estimate
        self._stages = tuple(stages)
        self._measured: dict[int, int] = {}
        self._jobs: dict[int, Counted] = {}
        self._tally = Tally(len(devices))

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """A `Peak` for each CPU lane and each CUDA device."""
        return tuple(
            Peak(
                str(stream.place(self._devices[lanes[0]])),
                tuple(self._first_lane + lane for lane in lanes),
                self._predicted(lanes),
                self._measured.get(lanes[0]),
            )
            for lanes in self._sharing()
        )

    def _predicted(self, lanes: Sequence[int]) -> int:
        """As if all were at their fullest at once, if no more is known of them together."""
        together = self._estimate.together_bytes
        if together is not None and 1 < len(lanes) == len(self._devices):
            return together
        return sum(self._estimate.peak_bytes[lane] for lane in lanes)

    def __str__(self) -> str:
        return "\n".join(map(str, self.peaks))

    def __enter__(self) -> "Memory":
        if any(stream.peak_bytes(device) is None for device in self._devices):
            _first_op()
        for stage in self._stages:
            self._tally.add(stage.lane, _state(stage))
        for lanes in self._sharing():
            stream.reset_peak_bytes(self._devices[lanes[0]])
        self._count(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._count(None)
        for lanes in self._sharing():
            peak = stream.peak_bytes(self._devices[lanes[0]])
            self._measured[lanes[0]] = self._tally.peaks[lanes[0]] if peak is None else peak

    def counted(self, jobs: Sequence[Job]) -> list[Job]:
        """The lanes' jobs, which are counted as they run."""
        self._jobs = {
            lane: Counted(self._tally, lane, job)
            for lane, (job, device) in enumerate(zip(jobs, self._devices, strict=True))
            if stream.peak_bytes(device) is None
        }
        return [self._jobs.get(lane, job) for lane, job in enumerate(jobs)]

    def beside(self, lane: int) -> AbstractContextManager[object]:
        """What ops of the block make, on another thread than the lane's, is the lane's."""
        return Counted(self._tally, lane, _nothing) if lane in self._jobs else nullcontext()

    def resized(self, lane: int, tensors: Iterable[Tensor]) -> None:
        """Storages have another size than before; `tensors` are in those that have one."""
        if lane in self._jobs:
            self._tally.drop_resized()
            self._tally.add(lane, [*map(_local, tensors)])

    def held(self, tensor: Tensor, lane: int) -> Tensor:
        """What `lane` has, for a step, of a parameter that another lane owns: a copy of its own."""
        if stream.peak_bytes(self._devices[lane]) is None:
            tensor = tensor.clone()
            self._tally.add(lane, [tensor])
        return tensor

    def entered(self, tensor: Tensor, lane: int) -> Tensor:
        """What `lane` gets of the caller's `tensor`, on the lane's thread: a copy of its own."""
        return tensor.clone() if lane in self._jobs else tensor

    def sent(self, tensor: Tensor, source: int, target: int) -> Tensor:
        """What lane `target` gets of `tensor`, which lane `source` sends: a copy of its own."""
        if source == target or not {source, target} <= self._jobs.keys():
            return tensor
        with self._jobs[source].counting_for(target):
            return tensor.clone()

    def _sharing(self) -> list[tuple[int, ...]]:
        """The lanes, together where they share memory."""
        groups: dict[object, list[int]] = {}
        for lane, device in enumerate(self._devices):
            where = stream.place(device)
            groups.setdefault(lane if where.type == "cpu" else where, []).append(lane)
        return [tuple(lanes) for lanes in groups.values()]


class _Reference(weakref.ref[torch.UntypedStorage]):
    """A tensor's memory, while it is there."""

    __slots__ = ("address", "lane", "n_bytes")
    address: int
    lane: int
    n_bytes: int


class Tally:
    """The bytes that each lane holds. Any thread may add; memory goes when it goes."""

    def __init__(self, n_lanes: int) -> None:
        self.peaks = [0] * n_lanes
        self._held = [0] * n_lanes
        self._known: dict[int, _Reference] = {}
        # Memory goes at any moment and in any thread: it is only noted then.
        self._gone: deque[_Reference] = deque()
        self._lock = threading.Lock()

    def add(self, lane: int, tensors: Iterable[Tensor]) -> None:
        """Count the memory of `tensors`, each once."""
        with self._lock:
            while self._gone:
                gone = self._gone.popleft()
                del self._known[gone.address]
                self._held[gone.lane] -= gone.n_bytes
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in self._known:
                    new = _Reference(storage, self._gone.append)
                    new.address, new.n_bytes, new.lane = storage.data_ptr(), storage.nbytes(), lane
                    self._known[new.address] = new
                    self._held[lane] += new.n_bytes
            self.peaks[lane] = max(self.peaks[lane], self._held[lane])

    def drop_resized(self) -> None:
        """Count no more what has another size than when it was added."""
        with self._lock:
            for address, known in [*self._known.items()]:
                storage = known()
                if storage is not None and storage.nbytes() != known.n_bytes:
                    del self._known[address]
                    self._held[known.lane] -= known.n_bytes


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A lane's job; what its ops make, on the thread that calls it, is counted."""

    def __init__(self, tally: Tally, lane: int, job: Job) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally = tally
        self._lane = lane
        self._job = job

    def __call__(self) -> None:
        """Do the job."""
        with self:
            self._job()

    @contextmanager
    def counting_for(self, lane: int) -> Iterator[None]:
        """What this lane's ops make in the block is another's."""
        own, self._lane = self._lane, lane
        try:
            yield
        finally:
            self._lane = own

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op."""
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, *(kwargs or {}).values()))}
        self._tally.add(
            self._lane,
            [t for t in _tensors(result) if t.untyped_storage().data_ptr() not in given],
        )
        return result


@cache
def _first_op() -> None:
    """What torch does in the first op that a mode sees, before any is counted.

    It imports a large part of itself, and keeps the frames that run then, and what is in them,
    until the collector comes by: in a step that were a forward's values.
    """
    with Counted(Tally(1), 0, _nothing):
        torch.empty(0)
    gc.collect()


def _tensors(node: Any) -> Iterator[Tensor]:
    """Those that have memory; a sparse one has parts, which ops made before it."""
    if isinstance(node, Tensor):
        if node.layout is torch.strided:
            yield node
    elif isinstance(node, tuple | list):
        for child in node:
            yield from _tensors(child)


def _state(stage: Stage) -> Iterator[Tensor]:
    yield from stage.module.buffers()
    for parameter in stage.module.parameters():
        yield _local(parameter)
        if parameter.grad is not None:
            yield from _parts(_local(parameter.grad))


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def _local(tensor: Tensor) -> Tensor:
    """What is here of it, if it is a DTensor, whose module takes long to import."""
    return getattr(tensor, "to_local", lambda: tensor)()


def _nothing() -> None: ...


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"
