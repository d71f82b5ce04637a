"""The processes of a pipeline and its replicas: how they meet, and how one's failure is heard of.

There are dp * p of them, rank d * p + s of `torch.distributed` being that of device s in replica d.

Whatever may wait for another process waits on another thread than the caller's: a wait in gloo ends
only with its group. Meanwhile the caller looks, time and again, whether a rank has failed, and how
long it waits already.
"""

import itertools
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.tensor import DTensor

from fxpipe.errors import InputError
from fxpipe.runtime import stream
from fxpipe.runtime.distributed import gathering
from fxpipe.runtime.distributed.agreement import refuse_differing, refuse_replicas
from fxpipe.runtime.distributed.board import Board
from fxpipe.runtime.distributed.dtensors import whole
from fxpipe.runtime.distributed.failures import Failures
from fxpipe.runtime.distributed.last_words import last_words
from fxpipe.runtime.distributed.mesh import mesh_of
from fxpipe.runtime.distributed.patience import LOOK_S, Patience, wait_checking
from fxpipe.runtime.distributed.progress import Progress
from fxpipe.runtime.distributed.rendezvous import backend, meet
from fxpipe.runtime.distributed.worker import Job, Trouble, Worker

T = TypeVar("T")

# Gloo's own limit: a receive is posted long before anybody waits for it.
_UNLIMITED = timedelta(days=365)
_loads = itertools.count()


class MistakenError(Exception):
    """A call that began as the last one did, which the others were not called like: begin anew."""


def _destroy(groups: Sequence[Any]) -> None:
    if dist.is_initialized():
        for group in groups:
            dist.destroy_process_group(group)


class Ranks:
    """This process: `rank` among the `size` of its pipeline, which is number `replica` of `dp`.

    `group` is of its pipeline, `replica_group` of those that hold the same stages, `world_group` of
    all. Under torchrun the environment says how to set `torch.distributed` up; it is done here if
    need be. A rank waits `timeout_s` seconds for others, and then ends; `progress` says where it
    is.
    """

    def __init__(self, dp: int, timeout_s: float) -> None:
        """Raises InputError elsewhere, and, alike on all, if there can't be `dp` replicas.

        StageError if the other ranks don't come.
        """
        if not 0 < timeout_s <= _UNLIMITED.total_seconds():
            raise InputError(f"timeout_s is {timeout_s}: give seconds above 0, at most a year's")
        meet(timeout_s)
        self.world_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.progress = Progress()
        self._groups: list[Any] = []
        # Each has threads that wake up a hundred times a second.
        weakref.finalize(self, _destroy, self._groups)
        self._waited: list[Any] = []  # groups that this rank may wait in
        self._trouble: Trouble = []
        self._collectives = Worker("collectives", None, self._trouble)
        store = PrefixStore(f"fxpipe/{next(_loads)}", _get_default_store())
        self._board = Board(store, self.world_rank, self.world_size, self.progress.__str__)
        weakref.finalize(self, self._board.close)
        self._failures = Failures(self._board, self.progress, self._waited)
        self._patience = Patience(
            timeout_s, self._board, self.progress, self._failures, self._trouble
        )
        self._await_all()
        self.world_group = self.new_group(range(self.world_size))
        found = self.gather_world((dp, uuid.uuid4().hex))
        refuse_replicas([each for each, _ in found], self.world_size)
        self._name = found[0][1]
        self.dp = dp
        self.size = self.world_size // dp
        self.replica, self.rank = divmod(self.world_rank, self.size)
        self._patience.near = range(self.in_world(0), self.in_world(self.size))
        places = torch.arange(self.world_size).view(dp, self.size)
        self.group = self._subgroup(places)
        self.replica_group = self._subgroup(places.T) if dp > 1 else None
        names = {r: f"rank {self.in_world(r)}" for r in range(self.size) if r != self.rank}
        self.sending = {r: Worker(f"to {name}", name, self._trouble) for r, name in names.items()}

    def _await_all(self) -> None:
        """Return once all ranks have come here. Raises StageError."""
        come = self._board.count("come", 1)
        while come is None or come < self.world_size:
            missing = "an answer of torch.distributed's store"
            if come is not None:
                missing = f"{self.world_size - come} of {self.world_size} ranks to call load"
            self._patience.look(missing)
            time.sleep(0.02)
            come = self._board.count("come", 0)
        self.progress.wait_for(None)

    def new_group(self, members: Sequence[int]) -> Any:
        """A group of these ranks of the world, None on others; all make it together."""
        made: list[Any] = []
        self.together(
            lambda: made.append(
                dist.new_group(list(members), backend=backend(), timeout=_UNLIMITED)
            )
        )
        if self.world_rank not in members:
            return None
        self._groups.append(made[0])
        self._waited.append(made[0])
        return made[0]

    def _subgroup(self, rows: Tensor) -> Any:
        """The group of that row of ranks that this process is in."""
        made = [self.new_group(row) for row in rows.tolist()]
        return next(group for group in made if group is not None)

    @property
    def on_this_host(self) -> int:
        """How many of the processes share this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    def mesh(self, kind: str) -> DeviceMesh:
        """The processes as a mesh of dimensions "dp" and "pp"; all ask for it together."""
        found: list[DeviceMesh] = []
        self.together(lambda: found.append(mesh_of(kind, self.dp, self.size)))
        self._waited += [g for g in found[0].get_all_groups() if g not in self._waited]
        return found[0]

    @property
    def step_name(self) -> str:
        """Names what the ranks of this pipeline do now together, as nothing else is named."""
        return f"{self.progress.doing} of replica {self.replica} of {self._name}"

    def in_world(self, rank: int) -> int:
        """The rank of `torch.distributed` that `rank` of this pipeline is."""
        return self.replica * self.size + rank

    def gather(self, mine: T) -> list[T]:
        """What each rank of this pipeline gives, in order of the ranks."""
        return self._gathered(mine, self.group, self.in_world(0))

    def gather_world(self, mine: T) -> list[T]:
        """What each rank of all replicas gives, in order of the ranks."""
        return self._gathered(mine, self.world_group, 0)

    def gather_numbers(self, mine: Sequence[float]) -> list[list[float]]:
        """The same of a few numbers, as many on each rank: a message each, and no pickle."""
        done, found = self.begin_numbers(mine)
        self.wait(done)
        return found

    def begin_numbers(self, mine: Sequence[float]) -> tuple[threading.Event, list[list[float]]]:
        """Begin to gather numbers; the event says that the list has them."""
        found: list[list[float]] = []
        own, work = list(mine), self.progress.work
        gather = partial(gathering.numbers, own, work, self.world_group, 0)
        return self.begin(lambda: found.extend(gather())), found

    def _gathered(self, mine: T, group: Any, first: int) -> list[T]:
        found: list[T] = []
        gather = partial(gathering.objects, mine, self.progress.work, group, first)
        # Not on this thread: in inference mode it makes tensors that another one can't write.
        self.together(lambda: found.extend(gather()))
        return found

    def hand_over(self, tensor: Tensor, source: int, target: int) -> None:
        """Fill `tensor` on rank `target` of all with what it holds on `source`; both call it."""
        if self.world_rank == source:
            self.together(lambda: dist.send(tensor, target, self.world_group))
        else:
            self.together(lambda: dist.recv(tensor, source, self.world_group))

    def whole(self, tensor: Tensor) -> Tensor:
        """All of one of which each replica may hold a share; those that do call it together."""
        found = [tensor]
        if isinstance(tensor, DTensor):
            self.together(lambda: found.append(whole(tensor)))
        return found[-1]

    def together(self, collective: Job) -> None:
        """Run what all ranks run; raises StageError if one fails meanwhile."""
        self.wait(self.begin(collective))

    def begin(self, collective: Job) -> threading.Event:
        """Begin what all ranks run, after all that was begun before; the event says it is done."""
        done = threading.Event()
        # On a GPU it follows what the caller has launched, and the caller goes on after it.
        streams = stream.current_streams()

        def job() -> None:
            with stream.use_streams(streams):
                collective()
            done.set()

        self._collectives.put(job)
        return done

    def wait(self, done: threading.Event) -> None:
        """Return once `done` is set. Raises StageError if a rank fails meanwhile or is too late."""
        self._failures.refuse()
        while not done.wait(LOOK_S):
            self._patience.look(self.progress.awaited())
        self.progress.wait_for(None)

    def lose(self, rank: int, error: RuntimeError) -> None:
        """Note what a wait for `rank` of this pipeline has raised: `wait` will say so."""
        self._trouble.append((f"rank {self.in_world(rank)}", error))

    def flush(self, targets: Iterable[int], check: Callable[[], None]) -> None:
        """Return once all that was sent to `targets` has left; `check` may raise meanwhile."""
        left = {rank: threading.Event() for rank in targets}
        for rank, event in left.items():
            self.sending[rank].put(event.set)
        wait_checking(left.values(), check)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Let the other ranks hear of it if the block fails."""
        try:
            with last_words(self._last_words), self.progress.inside():
                yield
        except MistakenError:
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def _last_words(self) -> str:
        self.progress.wait_for(self.progress.awaited())
        heard = self._failures.heard or f"rank {self.world_rank} {self.progress}"
        return f"rank {self.world_rank} is told to end by SIGTERM. {heard}"

    def fail(self, error: BaseException) -> None:
        """Let the other ranks hear of it, and end all waits for them.

        Raises StageError instead if another rank has failed before.
        """
        self._failures.fail(error)

    def agree(self, facts: Mapping[str, object], problem: str | None) -> None:
        """Raise, on all ranks, if one has a `problem`, or if their facts differ."""
        refuse_differing(self.gather_world((dict(facts), problem)))
