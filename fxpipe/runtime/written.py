"""The buffers that a stage's forward writes, as they were: what it begins with when it runs again.

Batch norms have many small ones. All of a kind are copied by one op, since with each a lane lets
go of Python's lock and may wait to have it back.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from fxpipe.runtime.swapping import holder_of


class Written:
    """The values that buffers `names` of the module have now."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._places = [
            (holder_of(module, name)._buffers, name.rpartition(".")[2]) for name in names
        ]
        self._copies = [_Copy(*group) for group in _alike(self._live())]

    @contextmanager
    def again(self) -> Iterator[None]:
        """In the block the module has these values, and may write them; then what it had before."""
        before = self._live()
        try:
            for copy in self._copies:
                self._put(copy.places, copy.tensors())
            yield
        finally:
            self._put(range(len(before)), before)

    def _live(self) -> list[Tensor]:
        return [buffers[leaf] for buffers, leaf in self._places]  # type: ignore[misc]

    def _put(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        for place, tensor in zip(places, tensors, strict=True):
            buffers, leaf = self._places[place]
            buffers[leaf] = tensor


class _Copy:
    """Tensors of one kind, one behind the other."""

    def __init__(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self.places = places
        self._like = tensors
        flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
        self._values = flat.clone() if len(tensors) == 1 else flat  # of one it is a view

    def tensors(self) -> list[Tensor]:
        """Copies, each with a version of its own: what is written in one says nothing of others."""
        values = self._values.clone()
        parts = _unflatten_dense_tensors(values, self._like)  # type: ignore[no-untyped-call]
        return [part.data for part in parts]


def _alike(tensors: Sequence[Tensor]) -> list[tuple[list[int], list[Tensor]]]:
    """Tensors of the same dtype and device, with their places."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(place)
    return [(places, [tensors[place] for place in places]) for places in groups.values()]
