"""Whether a call's tensors have the shapes that the stages take."""

from collections.abc import Iterator, Sequence

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


def misfits(manifest: Manifest, tensors: Sequence[Tensor]) -> Iterator[str]:
    """A message for each input of another shape, and for each size that the model does not take.

    How many rows each batched input has is not looked at.
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
    broken = [condition for condition in manifest.conditions if not holds(condition, values)]
    if broken and not wrong:
        named = ", ".join(f"{k} {v}" for k, v in values.items() if k in broken[-1])
        yield f"the model was compiled for inputs where {broken[-1]}, found {named}"


def _fits(given: InputSpec, tensor: Tensor, values: dict[str, int]) -> bool:
    shape = given.spec.shape
    first = 1 if given.batched else 0
    return tensor.dim() == len(shape) and all(
        (size(want, values) if isinstance(want, str) else want) == found
        for want, found in zip(shape[first:], tensor.shape[first:], strict=True)
    )
