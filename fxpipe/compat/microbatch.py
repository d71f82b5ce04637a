"""What goes from partition to partition: a tensor, or a tuple of tensors and other things."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class NoChunk:
    """A tensor that each micro-batch of a `Pipe` gets whole."""

    def __init__(self, inp: Tensor) -> None:
        if not isinstance(inp, Tensor):
            raise TypeError(f"NoChunk only supported for tensors, found: {inp}")
        self._tensor = inp

    @property
    def tensor(self) -> Tensor:
        """The tensor."""
        return self._tensor


@dataclass(frozen=True, slots=True)
class Form:
    """A value without its tensors: of a tuple its other items, None at the tensors' `places`."""

    items: tuple[Any, ...]
    places: tuple[int, ...]
    atomic: bool

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The value with these tensors."""
        items = list(self.items)
        for place, tensor in zip(self.places, tensors, strict=True):
            items[place] = tensor
        return items[0] if self.atomic else tuple(items)


def split(value: Any) -> tuple[Form, list[Tensor]]:
    """The form of a tensor or a tuple, and its tensors."""
    items = value if isinstance(value, tuple) else (value,)
    places = tuple(k for k, item in enumerate(items) if isinstance(item, Tensor))
    rest = tuple(None if isinstance(item, Tensor) else item for item in items)
    return Form(rest, places, not isinstance(value, tuple)), [items[k] for k in places]


def scatter(inputs: Sequence[Any], chunks: int) -> list[tuple[Any, ...]]:
    """For each micro-batch its rows of each tensor, and all else whole.

    As `torch.chunk` does it, a small batch may give fewer than `chunks`. Raises RuntimeError.
    """
    cut = [_cut(value, chunks) if isinstance(value, Tensor) else None for value in inputs]
    found = sorted({len(pieces) for pieces in cut if pieces is not None})
    if len(found) > 1:
        rows = ", ".join(str(value.size(0)) for value in inputs if isinstance(value, Tensor))
        raise RuntimeError(
            "Found different number of chunks produced for inputs: "
            f"{' and '.join(map(str, found))}, of {rows} rows. Give tensors of equally many rows; "
            "Pipe takes NoChunk(tensor) for one that each micro-batch shall get whole"
        )
    m = found[0] if found else 1
    whole = [value.tensor if isinstance(value, NoChunk) else value for value in inputs]
    return [
        tuple(
            value if pieces is None else pieces[i] for value, pieces in zip(whole, cut, strict=True)
        )
        for i in range(m)
    ]


def _cut(tensor: Tensor, chunks: int) -> list[Tensor]:
    """Its rows. Of what has no gradient each micro-batch may write its own in place.

    Views count the writes of all of them; `.data` counts anew.
    """
    return [piece if piece.requires_grad else piece.data for piece in tensor.chunk(chunks)]


def gather(outputs: Sequence[Any]) -> Any:
    """The mini-batch's output: tensors concatenated, all else as a list of the micro-batches'.

    Raises TypeError if micro-batches differ in type.
    """
    if not isinstance(outputs[0], tuple):
        return _gathered(outputs)
    return tuple(_gathered(values) for values in zip(*outputs, strict=True))


def _gathered(values: Sequence[Any]) -> Any:
    kinds = dict.fromkeys(type(value) for value in values)
    if len(kinds) > 1:
        found = " and ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"Types for microbatch outputs do not match, found: {found}")
    if not isinstance(values[0], Tensor):
        return list(values)
    return torch.cat(tuple(values))
