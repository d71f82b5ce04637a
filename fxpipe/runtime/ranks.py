"""The processes of a pipeline and its replicas: how they meet, and how one's failure is heard of.

There are dp * p of them, rank d * p + s of `torch.distributed` being that of device s in replica d.

Whatever may wait for another process waits on a thread of its own, since a wait in gloo can't be
woken. Meanwhile the one who wants it looks, time and again, for a word in the store that
`torch.distributed` was set up with: a rank that fails leaves one there, and all stay a moment until
each has read it.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from fxpipe.errors import DeviceError, FxpipeError, InputError, PackageError, StageError

T = TypeVar("T")
Job = Callable[[], object]

_NEVER = 2  # a tag that nobody sends with
_LOOK_S = 0.3  # how often one who waits looks for a failure
_END_S = 0.2  # how long a thread may take to end; one that waits for a lost rank doesn't
_STAY_S = 5.0  # how long a rank stays, after a failure, for the others to hear of it


class Worker:
    """A thread that does what it is given, in order; `trouble` gets what is raised."""

    def __init__(self, name: str, trouble: list[BaseException]) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        # The thread knows only its queue: what uses it can be collected while it idles.
        thread = threading.Thread(
            target=_work, args=(self._queue, trouble), name=f"fxpipe {name}", daemon=True
        )
        thread.start()
        weakref.finalize(self, _end, self._queue, thread)

    def put(self, job: Job) -> None:
        """Do this after all that was given before."""
        self._queue.put(job)


def _work(queue: SimpleQueue[Job | None], trouble: list[BaseException]) -> None:
    while (job := queue.get()) is not None:
        try:
            job()
        except BaseException as error:
            trouble.append(error)
            return
        del job


def _end(queue: SimpleQueue[Job | None], thread: threading.Thread) -> None:
    """Let the thread end, before Python does: torch's code in it can't be cut off."""
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_S)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """This process: `rank` among the `size` of its pipeline, which is number `replica` of `dp`.

    `group` is of its pipeline, `replica_group` of those that hold the same stages, `world_group` of
    all. Under torchrun the environment says how to set `torch.distributed` up; it is done here if
    need be.
    """

    def __init__(self, dp: int) -> None:
        """Raises InputError elsewhere, and, alike on all, if there can't be `dp` replicas."""
        if not dist.is_available():
            raise InputError("this torch was built without torch.distributed")
        if not dist.is_initialized():
            if "RANK" not in os.environ:
                raise InputError(
                    "distributed=True is for a script that torchrun starts, one process per "
                    "device: torchrun --nproc-per-node 2 script.py"
                )
            dist.init_process_group("gloo")
            # Else torch's own threads now and then abort the process as it ends.
            atexit.register(_leave)
        self.world_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.world_group = dist.new_group(backend="gloo")
        self._groups = [self.world_group]
        self._store = PrefixStore(f"fxpipe/{self.world_group.group_name}", _get_default_store())
        self._trouble: list[BaseException] = []
        self._heard: str | None = None
        self._collectives = Worker("collectives", self._trouble)
        _refuse_replicas(self.gather_world(dp), self.world_size)
        self.dp = dp
        self.size = self.world_size // dp
        self.replica, self.rank = divmod(self.world_rank, self.size)
        places = torch.arange(self.world_size).view(dp, self.size)
        self.group = _subgroup(places)
        self.replica_group = _subgroup(places.T)
        self._groups += [self.group, self.replica_group]
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.sending = {rank: Worker(f"to rank {rank}", self._trouble) for rank in others}
        self.receiving = {rank: Worker(f"from rank {rank}", self._trouble) for rank in others}

    @property
    def on_this_host(self) -> int:
        """How many of the processes share this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    @property
    def mesh(self) -> DeviceMesh:
        """The processes as a mesh of dimensions "dp" and "pp"."""
        places = torch.arange(self.world_size).view(self.dp, self.size)
        groups = [self.replica_group, self.group]
        return DeviceMesh.from_group(groups, "cpu", places, mesh_dim_names=("dp", "pp"))

    def in_world(self, rank: int) -> int:
        """The rank of `torch.distributed` that `rank` of this pipeline is."""
        return self.replica * self.size + rank

    def gather(self, mine: T) -> list[T]:
        """What each rank of this pipeline gives, in order of the ranks."""
        return self._gathered(mine, self.size, self.group)

    def gather_world(self, mine: T) -> list[T]:
        """What each rank of all replicas gives, in order of the ranks."""
        return self._gathered(mine, self.world_size, self.world_group)

    def _gathered(self, mine: T, size: int, group: Any) -> list[T]:
        found: list[T | None] = [None] * size
        self.together(lambda: dist.all_gather_object(found, mine, group))
        return found  # type: ignore[return-value]

    def hand_over(self, tensor: Tensor, source: int, target: int) -> None:
        """Fill `tensor` on rank `target` of all with what it holds on `source`; both call it."""
        if self.world_rank == source:
            self.together(lambda: dist.send(tensor, target, self.world_group))
        else:
            self.together(lambda: dist.recv(tensor, source, self.world_group))

    def together(self, collective: Job) -> None:
        """Run what all ranks run; raises StageError if one fails meanwhile."""
        done = threading.Event()

        def job() -> None:
            collective()
            done.set()

        self._collectives.put(job)
        self.wait(done)

    def wait(self, done: threading.Event) -> None:
        """Return once `done` is set. Raises StageError if a rank fails meanwhile."""
        self._refuse_after_failure()
        while not done.wait(_LOOK_S):
            self._look()

    def flush(self, targets: Sequence[int], check: Callable[[], None]) -> None:
        """Return once all that was sent to `targets` has left; `check` may raise meanwhile."""
        left = {rank: threading.Event() for rank in targets}
        for rank, event in left.items():
            self.sending[rank].put(event.set)
        for event in left.values():
            while not event.wait(_LOOK_S):
                check()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Let the other ranks hear of it if the block fails."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends for `error`, unless it does since it was told.

        Raises StageError instead if another rank has failed before.
        """
        if self._heard is not None:
            return
        own = f"rank {self.world_rank} failed: {_told(error)}"
        first = self._first(own)
        if first != own:
            raise self._hear(first) from error
        self._heard = own
        self._stay()

    def agree(self, facts: Mapping[str, object], problem: str | None) -> None:
        """Raise, on all ranks, if one has a `problem`, or if their facts differ."""
        found = self.gather_world((dict(facts), problem))
        problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]
        if problems:
            raise PackageError("\n".join(["the pipeline can't start:", *problems]))
        differing = [
            f"{name}: rank 0 has {found[0][0].get(name)}, rank {rank} has {other.get(name)}"
            for rank, (other, _) in enumerate(found)
            for name in {**found[0][0], **other}
            if other.get(name) != found[0][0].get(name)
        ]
        if differing:
            raise PackageError(
                "\n  ".join(["the ranks of this pipeline differ:", *differing])
                + "\ngive each the same package and the same versions"
            )

    def _refuse_after_failure(self) -> None:
        if self._heard is not None:
            raise StageError(f"{self._heard}. Its pipeline has ended: start all processes again")

    def _look(self) -> None:
        try:
            if self._store.check(["failed"]):
                raise self._hear(self._store.get("failed").decode())
        except dist.DistError as error:
            raise StageError(
                f"rank {self.world_rank} has lost the process that keeps torch.distributed's "
                f"store: {error}"
            ) from error
        if self._trouble:
            # Who failed, if somebody did, has said so before it ended.
            self._cancel()
            raise StageError(
                f"rank {self.world_rank} has lost another rank, whose process has ended or can't "
                f"be reached any more: {_told(self._trouble[0])}"
            )

    def _first(self, own: str) -> str:
        """What the first rank that failed has said; this one's word if none has."""
        try:
            return self._store.compare_set("failed", "", own).decode()
        except dist.DistError:
            return own

    def _hear(self, message: str) -> StageError:
        self._heard = message
        self._store.add("heard", 1)
        self._stay()
        return StageError(message)

    def _stay(self) -> None:
        """Until all have heard: torchrun ends all processes as soon as one has ended."""
        until = time.monotonic() + _STAY_S
        while time.monotonic() < until and self._store.add("heard", 0) < self.world_size - 1:
            time.sleep(0.02)
        self._cancel()

    def _cancel(self) -> None:
        """End all waits in the groups, on this rank and its peers.

        Gloo does so where one of them takes too long; else their threads could not end.
        """
        for group in self._groups:
            for peer in range(group.size()):
                if peer == group.rank():
                    continue
                with suppress(RuntimeError):
                    work = dist.irecv(torch.empty(1), group=group, tag=_NEVER, group_src=peer)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, FxpipeError) else f"{type(error).__name__}: {error}"


def _refuse_replicas(dps: Sequence[int], world_size: int) -> None:
    dp = dps[0]
    for rank, other in enumerate(dps):
        if other != dp:
            raise InputError(f"rank 0 was given dp={dp}, rank {rank} dp={other}: give all the same")
    if dp < 1 or world_size % dp:
        raise InputError(
            f"dp={dp}: {world_size} processes can't be cut into so many replicas of a pipeline: "
            "start a multiple of dp"
        )


def _subgroup(rows: Tensor) -> Any:
    """The group of that row of ranks that this process is in; all make theirs together."""
    made = [dist.new_group(row, backend="gloo") for row in rows.tolist()]
    return next(group for group, row in zip(made, rows, strict=True) if dist.get_rank() in row)


def refuse_size(ranks: Ranks, n_devices: int) -> None:
    """Raise DeviceError unless there is a process for each device of each replica."""
    if ranks.size != n_devices:
        of_each = f" in each of dp={ranks.dp} replicas" if ranks.dp > 1 else ""
        raise DeviceError(
            f"the package was compiled for {n_devices} devices, {ranks.size} processes run "
            f"it{of_each}: start {n_devices * ranks.dp} of them (torchrun --nproc-per-node "
            f"{n_devices * ranks.dp}), or compile with --devices {ranks.size}"
        )
