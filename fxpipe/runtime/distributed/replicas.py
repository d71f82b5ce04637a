"""Data parallelism: what replicas of a pipeline find on their own batches is added up over them.

Losses are weighted by their rows' share of all replicas' rows, so that the sum of the gradients is
the gradient of the mean over all. They are summed in buckets, while the rest of the schedule runs.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime.distributed.dtensors import broadcast
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.distributed.sums import Sums
from fxpipe.runtime.end import LossFn
from fxpipe.runtime.nodes import nodes_below
from fxpipe.runtime.stage import Stage

T = TypeVar("T", bound=Tensor)

# As much as DistributedDataParallel sends at once.
BUCKET_BYTES = 25 * 2**20


class Replicas:
    """This rank among those that hold the same stages, for replicas' gradients and buffers.

    `order` is that of the stages' reductions: a parameter of several is in the last one's.
    """

    def __init__(
        self,
        ranks: Ranks,
        stages: Sequence[Stage],
        order: Sequence[int],
        first_names: Mapping[str, str],
        shared: Collection[str],
    ) -> None:
        """`shared` are the first names of parameters that are summed elsewhere."""
        self._ranks = ranks
        self._modules = {stage.index: stage.module for stage in stages}
        names = {stage.index: stage.spec.parameters for stage in stages}
        last = {first_names[name]: (j, name) for j in order for name in names[j]}
        self._names: dict[int, list[str]] = {j: [] for j in order}
        for first, (j, name) in last.items():
            if first not in shared:
                self._names[j].append(name)
        self._sums: Sums | None = None

    def equalize(self, tensors: Sequence[Tensor]) -> None:
        """Give all replicas the first one's values. All their ranks call it together."""
        if not tensors:
            return

        def collective() -> None:
            for tensor in tensors:
                broadcast(tensor, self._ranks.replica_group, 0)

        self._ranks.together(collective)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """For `step`: when the block ends, each parameter's gradient has the sum over replicas."""
        trained = chain.from_iterable(map(self._trained, self._names))
        with Sums(self._ranks, trained).begun() as self._sums:
            try:
                yield
                self._sums.finish()
            finally:
                self._sums = None

    @contextmanager
    def summed(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """When the block ends, its gradients of `parameters` have the sum over replicas."""
        trained = [p for p in parameters if p.requires_grad]
        with Sums(self._ranks, trained).begun() as sums:
            yield
            with self._ranks.telling():
                for each in buckets(trained):
                    sums.add_up(each)
                sums.finish()

    def reduce(self, j: int) -> None:
        """Begin to sum the gradients of stage j. Raises InputError if one is sparse."""
        assert self._sums is not None
        for each in buckets(self._trained(j)):
            self._sums.add_up(each)

    def _trained(self, j: int) -> list[Tensor]:
        """What stage j's reduction sums, in its order."""
        found = [self._modules[j].get_parameter(name) for name in reversed(self._names[j])]
        return [parameter for parameter in found if parameter.requires_grad]


def trains_nothing(loss_fn: LossFn, output: Any, target: Any) -> Tensor:
    """Its loss. Raises InputError if that also depends on what requires grad besides the output."""
    loss = loss_fn(output, target)
    roots = [loss.grad_fn] if isinstance(loss, Tensor) and loss.grad_fn is not None else []
    ends: list[Any] = [node for node, below in nodes_below(roots).items() if not below]
    leaves = [end.variable for end in ends if hasattr(end, "variable")]
    own = [list(leaf.shape) for leaf in leaves if leaf.numel()]  # the output begins at an empty one
    if own:
        raise InputError(
            f"it trains something of shape {own[0]} besides the pipeline, whose gradients nobody "
            "adds up over the replicas: make that a part of the model, or train by a "
            "fxpipe.Runner with around=loss_fn.parameters()"
        )
    return loss


def buckets(parameters: Sequence[T]) -> list[list[T]]:
    """Those of one dtype together, in buckets of BUCKET_BYTES or one larger parameter."""
    found: dict[torch.dtype, list[list[T]]] = {}
    sizes: dict[torch.dtype, int] = {}
    for parameter in parameters:
        dtype, n_bytes = parameter.dtype, parameter.nbytes
        if dtype not in found or sizes[dtype] + n_bytes > BUCKET_BYTES:
            found.setdefault(dtype, []).append([])
            sizes[dtype] = 0
        found[dtype][-1].append(parameter)
        sizes[dtype] += n_bytes
    return [bucket for buckets in found.values() for bucket in buckets]
