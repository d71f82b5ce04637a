"""Which stage a value comes from and which read it, however far away.

A value goes straight from its stage to each that reads it (torchgpipe, section 3.4: portals); its
gradients come back the same way and are added in the order of the readers. The pipeline's end,
where outputs are put together and the loss is computed, reads like one more stage, `n`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fxpipe.runtime.manifest import Manifest, there

CALLER = -1


class Wire(NamedTuple):
    """A value and the stage that makes it, or CALLER."""

    source: int
    value: str


@dataclass(frozen=True, slots=True)
class Wires:
    """`reads[j]`: what stage j takes, each once, in order; `readers`: the stages that take it."""

    reads: tuple[tuple[Wire, ...], ...]
    readers: Mapping[Wire, tuple[int, ...]]

    @classmethod
    def of(cls, manifest: Manifest, training: bool) -> "Wires":
        """The wires of a package in train or in eval mode."""
        reads = [
            [
                Wire(source_of(port.source), port.value)
                for port in stage.inputs
                if there(port.mode, training)
            ]
            for stage in manifest.stages
        ]
        reads.append(
            [
                Wire(source_of(output.stage), output.value)
                for output in manifest.outputs
                if there(output.mode, training)
            ]
        )
        once = tuple(tuple(dict.fromkeys(wires)) for wires in reads)
        readers: dict[Wire, list[int]] = {}
        for j, wires in enumerate(once):
            for wire in wires:
                readers.setdefault(wire, []).append(j)
        return cls(once, {wire: tuple(stages) for wire, stages in readers.items()})


def add_gradients(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum, in order, of those that there are."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def source_of(stage: int | None) -> int:
    """The stage as a wire's source."""
    return CALLER if stage is None else stage
