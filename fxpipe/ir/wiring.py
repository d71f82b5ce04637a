"""Stages, what goes between them, and the files they become."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Port:
    """A value that a stage takes. `source` is the producing stage, None for the model's input.

    A portal comes from a stage other than the one before (torchgpipe, section 3.3).
    """

    value: str
    source: int | None
    portal: bool


@dataclass(frozen=True, slots=True)
class StageWiring:
    """One stage's ops in order, what it takes and what it hands on.

    `segments` are the runs of its ops that it computes again in backward.
    """

    ops: tuple[str, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[str, ...]
    segments: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Wiring:
    """The stages and how values go between them."""

    stages: tuple[StageWiring, ...]


@dataclass(frozen=True, slots=True)
class PackageFiles:
    """File name to content, as emission made it."""

    files: Mapping[str, str]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
