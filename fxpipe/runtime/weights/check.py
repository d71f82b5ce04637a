"""Checks weights as a whole, by their names and shapes, before any of them is loaded."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from fxpipe.errors import WeightsError

_SHOWN = 8


def check(
    wanted: Mapping[str, torch.Size],
    given: Collection[str],
    shape: Callable[[str], torch.Size],
    strict: bool,
    source: str,
) -> None:
    """Raise WeightsError, naming all missing, unexpected and wrongly shaped keys.

    `wanted` are the model's, `shape` tells that of a given one, `source` is where they are from.
    Missing and unexpected ones are allowed unless `strict`.
    """
    missing = [key for key in wanted if key not in given]
    unexpected = [key for key in given if key not in wanted]
    shapes = {key: (wanted[key], shape(key)) for key in wanted if key in given}
    misshapen = [
        f"{key}: expected {list(expected)}, found {list(found)}"
        for key, (expected, found) in shapes.items()
        if found != expected
    ]
    groups = [("missing", missing if strict else []), ("unexpected", unexpected if strict else [])]
    broken = [
        f"{len(keys)} {what}: {', '.join(keys[:_SHOWN])}{_more(keys)}"
        for what, keys in [*groups, ("of another shape", misshapen)]
        if keys
    ]
    if broken:
        raise WeightsError(
            f"the weights in {source} do not fit the model's {len(wanted)} parameters and buffers:"
            + "\n  ".join(["", *broken, *_prefix(missing, unexpected)])
            + "\nnothing was loaded; give those of the model that was compiled"
        )


def check_ties(first_names: Mapping[str, str], given: Mapping[str, Tensor]) -> None:
    """Raise WeightsError if names of one tensor are `given` several, as `assign` would have them.

    `first_names` has the first of its names by each of a tensor's.
    """
    known: dict[str, str] = {}
    for name, first in first_names.items():
        if name in given and not _equal(given[name], given[known.setdefault(first, name)]):
            raise WeightsError(
                f"{name!r} and {known[first]!r} are one in the pipeline, and the state_dict has "
                "two of different values for them, which assign=True would make them: nothing was "
                "loaded; load without assign, or untie them in the model, and compile it again"
            )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other.to(one.device))


def _more(keys: list[str]) -> str:
    return f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""


def _prefix(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """What the first given key lacks in front, or has too much, to be one of the model's."""
    for key in unexpected:
        for own in missing:
            if own.endswith(f".{key}"):
                return [f"names here lack {own.removesuffix(key)!r} in front: {key} for {own}"]
            if key.endswith(f".{own}"):
                return [f"names here have {key.removesuffix(own)!r} in front: {key} for {own}"]
    return []
