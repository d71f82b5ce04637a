"""What goes from stage to stage under `torch.distributed.pipelining`: of fixed shape and dtype."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime.fit import unmet
from fxpipe.runtime.manifest import Manifest, TensorSpec
from fxpipe.runtime.portal import CALLER, Wire, Wires


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value between two stages, or at an end, of one micro-batch."""

    wire: Wire
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def example(self) -> Tensor:
        """A tensor like it, without memory."""
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad
        )

    def __str__(self) -> str:
        grad = " with a gradient" if self.requires_grad else ""
        return f"{self.wire.value.partition(' of ')[0]} {self.dtype}{list(self.shape)}{grad}"


def reads(manifest: Manifest) -> list[tuple[Wire, ...]]:
    """What each stage takes from the one before, and the end from the last, in training.

    `manifest` is of a package whose values go from stage to stage.
    """
    inputs = tuple(Wire(CALLER, given.value) for given in manifest.inputs)
    return [inputs, *Wires.of(manifest, training=True).reads[1:]]


def specs(manifest: Manifest) -> dict[Wire, TensorSpec]:
    """By value, what is known of it."""
    found = {Wire(CALLER, given.value): given.spec for given in manifest.inputs}
    for j, stage in enumerate(manifest.stages):
        found |= {Wire(j, output.value): output.spec for output in stage.outputs}
    return found


def sizes_of_microbatch(manifest: Manifest, sizes: Mapping[str, int]) -> dict[str, int]:
    """All named sizes of one micro-batch, where a batch has `sizes`. Raises InputError."""
    known = {**manifest.sizes, "batch": manifest.batch}
    unknown = [name for name in sizes if name not in known]
    if unknown:
        raise InputError(f"the package has no size {', '.join(unknown)}: it has {', '.join(known)}")
    known |= sizes
    m, batch = manifest.microbatches, known["batch"]
    if batch % m or batch < 1:
        raise InputError(
            f"a batch of {batch} rows makes no {m} equal micro-batches, as "
            f"torch.distributed.pipelining needs: give batch={-(-max(batch, 1) // m) * m}"
        )
    known["batch"] = batch // m
    broken = unmet(manifest.conditions, known, [known["batch"]])
    if broken is not None:
        condition, found = broken
        raise InputError(
            f"the model was compiled for inputs where {condition} in each micro-batch, found "
            + ", ".join(f"{name} {n}" for name, n in found.items())
        )
    return known


def crossings(
    manifest: Manifest, sizes: Mapping[str, int], dtype: torch.dtype | None
) -> list[list[Crossing]]:
    """What goes into each stage, and out of the last, of one micro-batch of these sizes.

    `dtype` is for floats in the place of that which most parameters have. Raises InputError.
    """
    dtypes = _dtypes(manifest, dtype)
    known = specs(manifest)
    return [
        [
            Crossing(
                wire,
                known[wire].sizes(sizes),
                dtypes.get(known[wire].torch_dtype, known[wire].torch_dtype),
                known[wire].requires_grad,
            )
            for wire in wires
        ]
        for wires in reads(manifest)
    ]


def _dtypes(manifest: Manifest, dtype: torch.dtype | None) -> dict[torch.dtype, torch.dtype]:
    """What becomes of the dtype that most parameters have."""
    if dtype is None:
        return {}
    if not dtype.is_floating_point:
        raise InputError(f"dtype={dtype}: floats between stages have a dtype of floats")
    own = [spec.spec.torch_dtype for spec in manifest.state if spec.kind == "parameter"]
    floats = [found for found in own if found.is_floating_point] or [torch.float32]
    return {max(set(floats), key=floats.count): dtype}
