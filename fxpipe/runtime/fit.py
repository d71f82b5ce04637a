"""Whether a call's tensors have the shapes that the stages take."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from fxpipe.runtime.manifest import InputSpec, Manifest
from fxpipe.runtime.sizes import holds, size


def sizes_of(manifest: Manifest, tensors: Sequence[Tensor]) -> dict[str, int]:
    """The values that a call gives to the named sizes, each by the first input that has it."""
    found: dict[str, int] = {}
    for given, tensor in zip(manifest.inputs, tensors, strict=True):
        for dim, n in zip(given.spec.shape, tensor.shape, strict=False):
            if isinstance(dim, str) and dim.isidentifier():
                found.setdefault(dim, n)
    return found


def unmet(
    conditions: Iterable[str], values: Mapping[str, int], rows: Sequence[int]
) -> tuple[str, dict[str, int]] | None:
    """The first condition that sizes don't meet, and those that it is of; None if they meet all.

    The batch's are those of each micro-batch, which has so many `rows`.
    """
    for n_rows in sorted(set(rows), reverse=True):
        known = {**values, "batch": n_rows}
        for condition in conditions:
            if not holds(condition, known):
                words = set(re.findall(r"\w+", condition))
                return condition, {name: n for name, n in known.items() if name in words}
    return None


def misfits(manifest: Manifest, tensors: Sequence[Tensor], rows: Sequence[int]) -> Iterator[str]:
    """A message for each input of another shape, and for a size that the model does not take.

    Micro-batches have so many `rows`; how many each batched input has is not looked at.
    """
    values = manifest.sizes | {"batch": manifest.batch} | sizes_of(manifest, tensors)
    wrong = False
    for given, tensor in zip(manifest.inputs, tensors, strict=True):
        if not _fits(given, tensor, values):
            wrong = True
            shape = ", ".join(map(str, given.spec.shape))
            known = [f"{k} {v}" for k, v in values.items() if k in shape and k != "batch"]
            where = f" with {', '.join(known)}" if known else ""
            yield (
                f"input {given.value!r} must have shape [{shape}]{where}, "
                f"found {list(tensor.shape)}"
            )
    broken = None if wrong else unmet(manifest.conditions, values, rows)
    if broken is not None:
        condition, found = broken
        named = ", ".join(f"{name} {n}" for name, n in found.items())
        of = " in each micro-batch" if "batch" in found else ""
        how = ": give other rows, or compile it again with such a batch" if of else ""
        yield f"the model was compiled for inputs where {condition}{of}, found {named}{how}"


def _fits(given: InputSpec, tensor: Tensor, values: dict[str, int]) -> bool:
    shape = given.spec.shape
    first = 1 if given.batched else 0
    return tensor.dim() == len(shape) and all(
        (size(want, values) if isinstance(want, str) else want) == found
        for want, found in zip(shape[first:], tensor.shape[first:], strict=True)
    )
