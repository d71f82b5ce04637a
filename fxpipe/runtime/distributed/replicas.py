"""Data parallelism: what replicas of a pipeline find on their own batches is added up over them.

Losses are weighted by their rows' share of all replicas' rows, so that the sum of the gradients is
the gradient of the mean over all. They are summed in buckets, while the rest of the schedule runs.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.runtime.distributed.dtensors import broadcast
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.end import LossFn
from fxpipe.runtime.nodes import nodes_below
from fxpipe.runtime.stage import Stage

T = TypeVar("T", bound=Tensor)

# As much as DistributedDataParallel sends at once.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Gradients that are summed together; after them in `flat`, which of them replicas have."""

    parameters: Sequence[Tensor]
    flat: Tensor
    work: Any

    def give(self) -> None:
        """Once summed, give them to their parameters."""
        sizes = [parameter.numel() for parameter in self.parameters]
        *gradients, there = torch.split(self.flat, [*sizes, len(sizes)])
        for parameter, gradient, n in zip(self.parameters, gradients, there.tolist(), strict=True):
            parameter.grad = gradient.view_as(parameter) if n else None


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
        self._buckets: list[_Bucket] = []

    def equalize(self, tensors: Sequence[Tensor]) -> None:
        """Give all replicas the first one's values. All their ranks call it together."""
        if not tensors:
            return

        def collective() -> None:
            for tensor in tensors:
                broadcast(tensor, self._ranks.replica_group, 0)

        self._ranks.together(collective)

    @contextmanager
    def collected(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """For `step`: when the block ends, each parameter's gradient has the sum over replicas."""
        with kept_apart(parameters.values()):
            self._buckets = []
            try:
                yield
                self._ranks.together(lambda: _wait(self._buckets))
                for bucket in self._buckets:
                    bucket.give()
            finally:
                self._buckets = []

    @contextmanager
    def summed(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """When the block ends, its gradients of `parameters` have the sum over replicas."""
        with kept_apart(parameters):
            yield
            trained = [p for p in parameters if p.requires_grad]
            with self._ranks.telling():
                found = [self._begin(each) for each in buckets(trained)]
                self._ranks.together(lambda: _wait(found))
            for bucket in found:
                bucket.give()

    def reduce(self, j: int) -> None:
        """Begin to sum the gradients of stage j. Raises InputError if one is sparse."""
        module = self._modules[j]
        found = [module.get_parameter(name) for name in reversed(self._names[j])]
        for parameters in buckets([p for p in found if p.requires_grad]):
            self._buckets.append(self._begin(parameters))

    def _begin(self, parameters: Sequence[Tensor]) -> _Bucket:
        refuse_sparse(parameters)
        gradients = [p.grad for p in parameters]
        there = [float(gradient is not None) for gradient in gradients]
        parts = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(parameters, gradients, strict=True)
        ]
        flat = torch.cat([*(part.reshape(-1) for part in parts), parts[0].new_tensor(there)])
        for parameter in parameters:
            parameter.grad = None
        work = dist.all_reduce(flat, group=self._ranks.replica_group, async_op=True)
        return _Bucket(parameters, flat, work)


def _wait(found: Sequence[_Bucket]) -> None:
    for bucket in found:
        bucket.work.wait()


@contextmanager
def kept_apart(parameters: Iterable[Tensor]) -> Iterator[None]:
    """In the block gradients are a step's own; those of earlier ones have been summed then."""
    before = {parameter: parameter.grad for parameter in parameters}
    for parameter in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            _add(parameter, gradient)


def refuse_sparse(parameters: Iterable[Tensor]) -> None:
    """Raise InputError if one has a sparse gradient."""
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise InputError(
            "a sparse gradient can't be summed over replicas: make the embedding with sparse=False"
        )


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


def _add(parameter: Tensor, gradient: Tensor | None) -> None:
    """Add `parameter.grad` to `gradient`, which it becomes."""
    if gradient is None:
        return
    if parameter.grad is not None:
        gradient += parameter.grad
    parameter.grad = gradient
