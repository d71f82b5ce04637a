"""Data parallelism with parameters, gradients and optimizer states shared out over the replicas.

As with `Replicas`, each replica has its own batch; but between steps a rank holds no more than its
share of what its stages use. It gathers a stage's parameters before the stage's first action and
reduces their gradients after its last one, beside the rest of the row.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.runtime.call import Call
from fxpipe.runtime.distributed.messages import Free, Gather, Gathered, Item, Reduce
from fxpipe.runtime.distributed.patience import wait_checking
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.distributed.replicas import buckets
from fxpipe.runtime.distributed.shard import Shard
from fxpipe.runtime.distributed.sums import refuse_sparse
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.swapping import holder_of


@dataclass(slots=True)
class _Use:
    """A shard, the stages that use it, those that do now, and what says that it is there."""

    shard: Shard
    stages: tuple[int, ...]
    now: set[int] = field(default_factory=set)
    there: threading.Event | None = None

    def done(self, j: int) -> bool:
        """Stage j doesn't use it any more: whether none does, and it is not there from now on."""
        self.now.discard(j)
        if not self.now:
            self.there = None
        return not self.now


class Shards:
    """Those of one rank. What several stages use comes with their first and goes with their last.

    Whatever all replicas do together is done by one thread, in the order in which it is begun.
    """

    def __init__(
        self,
        ranks: Ranks,
        stages: Sequence[Stage],
        first_names: Mapping[str, str],
        mesh: DeviceMesh,
    ) -> None:
        """Share out over `mesh` what the stages hold, which is equal on all replicas."""
        self._ranks = ranks
        modules = {stage.index: stage.module for stage in stages}
        places: dict[str, list[tuple[int, str]]] = {}
        for stage in stages:
            for name in stage.spec.parameters:
                places.setdefault(first_names[name], []).append((stage.index, name))

        def held(first: str) -> nn.Parameter:
            j, name = places[first][0]
            parameter = holder_of(modules[j], name)._parameters[name.rpartition(".")[2]]
            assert parameter is not None
            return parameter

        together: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for first, found in places.items():
            users = tuple(dict.fromkeys(j for j, _ in found))
            together.setdefault(users, []).append(held(first))
        group = ranks.replica_group
        assert group is not None
        self._uses = [
            _Use(Shard([modules[j] for j in users], bucket, mesh, group), users)
            for users, parameters in together.items()
            for bucket in buckets(parameters)
        ]
        self.parameters = {first: held(first) for first in places}
        self._pending: list[threading.Event] = []
        self._awaits: int | None = None
        self.gathered = False

    @property
    def awaited(self) -> str | None:
        """What the row waits for, if it waits for parameters."""
        if self._awaits is None:
            return None
        return f"the parameters of stage {self._awaits}, from its replicas"

    def renew(self) -> None:
        """Take over what stands in the stages' modules now."""
        for use in self._uses:
            use.shard.renew()

    @contextmanager
    def collected(
        self, parameters: Mapping[str, nn.Parameter], finish: Callable[[], None]
    ) -> Iterator[None]:
        """For `step`: when the block ends, each share's gradient has the sum over the replicas.

        Then it will `finish`, before gradients of earlier steps are added.
        """
        with _kept_apart(parameters.values()):
            self._pending = []
            yield
            for event in self._pending:
                self._ranks.wait(event)
            finish()

    def run(self, item: Item, call: Call) -> None:
        """Run an item of the rank's row. Raises StoppedError if the call is stopped meanwhile."""
        match item:
            case Gather(j):
                self._gather(j, call)
            case Gathered(j):
                self._awaits = j
                found = [use.there for use in self._of(j) if use.there is not None]
                wait_checking(found, partial(call.check, 0))
                self._awaits = None
            case Reduce(j):
                self._reduce(j, call)
            case Free(j):
                self._free(j, call)

    def _gather(self, j: int, call: Call) -> None:
        self.gathered = True
        for use in self._of(j):
            use.now.add(j)
            if use.there is None:
                use.there = self._begin(call, j, "gather", use.shard, use.shard.gather)

    def _reduce(self, j: int, call: Call) -> None:
        for use in self._of(j):
            if use.done(j):
                refuse_sparse(use.shard.parameters)
                self._pending.append(self._begin(call, j, "reduce", use.shard, use.shard.reduce))

    def _free(self, j: int, call: Call) -> None:
        for use in self._of(j):
            if use.done(j):
                use.shard.free()
                call.resized(j, use.shard.parameters)

    def _of(self, j: int) -> list[_Use]:
        return [use for use in self._uses if j in use.stages]

    def _begin(
        self, call: Call, j: int, name: str, shard: Shard, collective: Callable[[], None]
    ) -> threading.Event:
        def job() -> None:
            with call.beside(j, f"{name} {j}"):
                collective()
            call.resized(j, shard.parameters)

        return self._ranks.begin(job)


@contextmanager
def _kept_apart(parameters: Iterable[Tensor]) -> Iterator[None]:
    """In the block gradients are a step's own; those of earlier ones have been summed then."""
    before = {parameter: parameter.grad for parameter in parameters}
    for parameter in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            if gradient is not None:
                if parameter.grad is not None:
                    gradient += parameter.grad
                parameter.grad = gradient
