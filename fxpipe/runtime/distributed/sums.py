"""Sums over replicas of the gradients of one step, which begin while its schedule still runs.

They come in buckets, and stay there: in the next step, if it adds up, each gradient goes on in its
place in the bucket, which is summed as it is.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime.distributed.earlier import parted
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.weight_gradients import has_hooks


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Gradients that are summed together; after them in `flat`, which of them replicas have.

    Those of earlier steps that lie elsewhere, and not in `flat`, are `elsewhere`.
    """

    parameters: Sequence[Tensor]
    flat: Tensor
    elsewhere: Sequence[Tensor | None]
    work: Any

    def give(self) -> None:
        """Once summed, give them to their parameters."""
        sizes = [parameter.numel() for parameter in self.parameters]
        *gradients, there = torch.split(self.flat, [*sizes, len(sizes)])
        each = zip(self.parameters, gradients, self.elsewhere, there.tolist(), strict=True)
        for parameter, found, earlier, n in each:
            total = found.view_as(parameter) if n else None
            parameter.grad = total if total is None or earlier is None else earlier.copy_(total)


class Sums:
    """Those of this rank's `parameters`.

    Gradients begin with this replica's part of what earlier steps have left; hooks on a parameter
    see what this step finds alone.
    """

    def __init__(self, ranks: Ranks, parameters: Iterable[Tensor]) -> None:
        self._ranks = ranks
        self._earlier = {p: p.grad for p in parameters if p.grad is not None}
        self._apart = {p: g for p, g in self._earlier.items() if has_hooks(p)}
        self._buckets: list[_Bucket] = []

    @contextmanager
    def begun(self) -> Iterator[Self]:
        """In the block gradients are this replica's, until they have been added up.

        If it fails before a backward, they are those of earlier steps.
        """
        with parted([(gradient, self._ranks.dp) for gradient in self._earlier.values()]):
            for parameter in self._apart:
                parameter.grad = None
            try:
                yield self
            except BaseException:
                for parameter, gradient in self._earlier.items():
                    parameter.grad = gradient
                raise

    def add_up(self, parameters: Sequence[Tensor]) -> None:
        """Begin to sum their gradients, of one dtype. Raises InputError if one is sparse."""
        refuse_sparse(parameters)
        for parameter in parameters:
            _add(parameter, self._apart.get(parameter))
        elsewhere: list[Tensor | None] = [None] * len(parameters)
        flat = _row(parameters)
        if flat is None:
            flat, elsewhere = _copied(parameters), [self._earlier.get(p) for p in parameters]
            for parameter in parameters:
                parameter.grad = None
        work = dist.all_reduce(flat, group=self._ranks.replica_group, async_op=True)
        self._buckets.append(_Bucket(parameters, flat, elsewhere, work))

    def finish(self) -> None:
        """Give the sums to the parameters once all are there."""
        self._ranks.together(self._wait)
        for bucket in self._buckets:
            bucket.give()

    def _wait(self) -> None:
        for bucket in self._buckets:
            bucket.work.wait()


def _row(parameters: Sequence[Tensor]) -> Tensor | None:
    """The bucket in which their gradients lie, each in its place, as an earlier step gave them."""
    sizes, first = [parameter.numel() for parameter in parameters], parameters[0].grad
    n = sum(sizes) + len(sizes)
    if first is None or first.untyped_storage().nbytes() != n * first.element_size():
        return None
    flat = first.as_strided((n,), (1,), 0)
    *places, there = torch.split(flat, [*sizes, len(sizes)])
    for parameter, place in zip(parameters, places, strict=True):
        gradient = parameter.grad
        if gradient is None or not gradient.is_contiguous():
            return None
        if gradient.data_ptr() != place.data_ptr():
            return None
    there.fill_(1)
    return flat


def _copied(parameters: Sequence[Tensor]) -> Tensor:
    """A bucket of their gradients."""
    gradients = [p.grad for p in parameters]
    there = [float(gradient is not None) for gradient in gradients]
    parts = [
        torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)
    ]
    return torch.cat([*(part.reshape(-1) for part in parts), parts[0].new_tensor(there)])


def refuse_sparse(parameters: Iterable[Tensor]) -> None:
    """Raise InputError if one has a sparse gradient."""
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise InputError(
            "a sparse gradient can't be summed over replicas: make the embedding with sparse=False"
        )


def _add(parameter: Tensor, gradient: Tensor | None) -> None:
    """Add `parameter.grad` to `gradient`, which it becomes."""
    if gradient is None:
        return
    if parameter.grad is not None:
        gradient += parameter.grad
    parameter.grad = gradient
