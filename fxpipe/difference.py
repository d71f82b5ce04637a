"""How far two groups of named tensors are apart."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from fxpipe.runtime.backward import as_reals, differentiable

_PIECE = 2**20  # elements


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one group of tensors is apart at worst; `missing` are on one side only, by name."""

    group: str
    tensors: int
    absolute: float
    relative: float
    worst: str | None
    missing: tuple[str, ...] = ()


def compare(
    group: str,
    found: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    negligible: float,
) -> Difference:
    """The largest absolute and relative difference of tensors with the same name.

    None stands for no tensor (a parameter without gradient); none on both sides is no difference.
    Tensors of other shapes, and values that are not finite on one side only, are infinitely far
    apart. A relative difference is that of a tensor's largest absolute difference to its largest
    expected element, but at least to `negligible` times the largest of all tensors of its kind
    (whole numbers or not) in the group: a bias that batch norm cancels has a gradient of pure
    rounding noise, whose elements agree in no digit, and that is no difference.
    """
    pairs = {
        name: (found.get(name), expected.get(name))
        for name in dict.fromkeys((*expected, *found))
        if found.get(name) is not None or expected.get(name) is not None
    }
    both = {name: (f, e) for name, (f, e) in pairs.items() if f is not None and e is not None}
    extents = {True: 0.0, False: 0.0}
    for _, e in both.values():
        kind = differentiable(e)
        extents[kind] = max(extents[kind], largest(e))
    absolute, relative, worst = 0.0, 0.0, None
    for name, (f, e) in both.items():
        away = distance(f, e)
        scale = max(largest(e), negligible * extents[differentiable(e)])
        share = away / scale if scale > 0 else (0.0 if away == 0 else inf)
        if share > relative:
            relative, worst = share, name
        absolute = max(absolute, away)
    missing = tuple(name for name in pairs if name not in both)
    return Difference(group, len(both), absolute, relative, worst, missing)


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest of their elements' absolute differences; infinite where one alone is finite."""
    if found.shape != expected.shape:
        return inf
    away = 0.0
    for f, e in zip(_pieces(found), _pieces(expected), strict=True):
        there = f.to(e.device)
        same = (there == e) | (there.isnan() & e.isnan())
        apart = torch.where(same, 0.0, (there - e).abs()).nan_to_num(nan=inf, posinf=inf)
        away = max(away, float(apart.max()))
    return away


def largest(tensor: Tensor) -> float:
    """The largest absolute value, of those that are finite."""
    finite = (piece.abs().nan_to_num(0.0, 0.0, 0.0) for piece in _pieces(tensor))
    return max((float(piece.max()) for piece in finite), default=0.0)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Its elements in float64, where they are, a few at a time; complex numbers as pairs.

    All of a large weight at once would take several times its memory, and go through the caches.
    """
    flat = as_reals(tensor.detach().to_dense()).reshape(-1)
    return (piece.double() for piece in torch.split(flat, _PIECE) if piece.numel())
