"""What of a whole pipeline's facts is one rank's."""

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.runtime.portal import CALLER, Wires


def wires_of(wires: Wires, homes: Sequence[int], rank: int) -> Wires:
    """The wires, those of the caller with the readers on this rank alone; `homes` of stages."""
    readers = {
        wire: tuple(j for j in stages if wire.source != CALLER or homes[j] == rank)
        for wire, stages in wires.readers.items()
    }
    return Wires(wires.reads, readers)


def estimate_of(estimate: EstimateSpec, rank: int) -> EstimateSpec:
    """What was predicted of one device."""
    return replace(
        estimate,
        peak_bytes=estimate.peak_bytes[rank : rank + 1],
        timeline=estimate.timeline[rank : rank + 1],
        memory=estimate.memory[rank : rank + 1],
    )
