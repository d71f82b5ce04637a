"""plan.json as data: the one description that the compiler writes and the runtime reads."""

import dataclasses
import json
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fxpipe.errors import PackageError
from fxpipe.runtime.read_json import read
from fxpipe.runtime.sizes import size
from fxpipe.runtime.structure import Structure

FORMAT = 9
UNKNOWN = "unknown"  # a size that depends on what the tensors hold

# The modes in which a value is there.
Mode = typing.Literal["both", "train", "eval"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and gradient of a value.

    A dimension is a number or an expression in named sizes, such as `batch` and `length`.
    """

    shape: tuple[int | str, ...]
    dtype: str
    requires_grad: bool = False

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{self.dtype!r}: give a dtype of torch, such as 'float32'")

    def sizes(self, values: Mapping[str, int]) -> tuple[int, ...]:
        """The shape where the named sizes have these values."""
        return tuple(dim if isinstance(dim, int) else size(dim, values) for dim in self.shape)

    def bytes(self, values: Mapping[str, int]) -> int:
        """Bytes where the named sizes have these values, and unknown ones the batch's."""
        known = {UNKNOWN: values["batch"], **values}
        return math.prod(self.sizes(known)) * self.torch_dtype.itemsize

    @property
    def of_data(self) -> bool:
        """Whether the shape depends on what the tensors hold."""
        return any(UNKNOWN in str(dim) for dim in self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A tensor of the caller: split into micro-batches along dimension 0, or whole to each."""

    value: str
    batched: bool
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class PortSpec:
    """A parameter of a stage's forward and where its value comes from.

    `source` is the stage that makes it, None for the caller. A portal comes from a stage other
    than the one before. In a mode that lacks the value the parameter is None.
    """

    parameter: str
    value: str
    source: int | None
    portal: bool
    spec: TensorSpec
    mode: Mode = "both"


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """A value that a stage returns, or, with its stage (None: the caller's own), the pipeline.

    In a mode that lacks the value the stage returns None in its place. It goes on `detached` if it
    comes of nothing that has a gradient, or nothing that reads it gives it one.
    """

    value: str
    stage: int | None
    spec: TensorSpec
    mode: Mode = "both"
    detached: bool = False


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """A part of a stage that its file recomputes: the first and the last module, or op, in it."""

    first: str
    last: str
    ops: int

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: its file, its ports, and what is predicted of it for one micro-batch.

    `parameters` and `buffers` are the names, as in the original's state, of what it holds;
    `mutated_buffers` those that forward writes; `random` says that forward draws random numbers.
    `segments` tells what its file recomputes in backward, `modes` which modules' lines in it hang
    on train or eval mode.
    """

    file: str
    class_name: str
    device: int
    checkpoint: str
    random: bool
    ops: int
    inputs: tuple[PortSpec, ...]
    outputs: tuple[OutputSpec, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    mutated_buffers: tuple[str, ...]
    forward_ms: float
    backward_ms: float
    parameter_bytes: int
    saved_bytes: int
    received_bytes: int
    segments: tuple[SegmentSpec, ...] = ()
    modes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A parameter or buffer of the original model, in its order. `alias_of`: tied to that one."""

    name: str
    kind: typing.Literal["parameter", "buffer", "constant"]
    spec: TensorSpec
    alias_of: str | None = None
    keeps_dtype: bool = False  # as a plain attribute, which the original's `to(dtype)` leaves alone


@dataclass(frozen=True, slots=True)
class EstimateSpec:
    """The predicted training step: milliseconds, idle share, bytes per device.

    `timeline` has a row per device, of cells like `0F3 1.5 2.25`: an action of the schedule that
    the package was compiled with, and when it begins and ends, in ms. `memory` has one too, of
    what the device holds from when on, `0.0 1024;1.5 2048`, in ms and bytes. `critical` are the
    actions that the step's length hangs on, in order of time. `capacity_bytes` is what each device
    has room for. The loss, `loss_ms`, is planned as part of the last stage's backwards. Of
    `peak_bytes`, `ahead_bytes` are set aside for messages that a process asks for ahead. Where
    GPUs wait for what the host launches, `captured_ms` is the step as one CUDA graph, and
    `together_bytes` is what all devices hold together at their fullest, if they share a memory. Of
    `waits` each has two actions, `0F3 1F1`: what the first sends to the device of the second waits
    until that has ended, for no device is to hold more than its peak.
    """

    step_ms: float
    bubble: float
    peak_bytes: tuple[int, ...]
    timeline: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    critical: tuple[str, ...] = ()
    capacity_bytes: tuple[int, ...] = ()
    loss_ms: float = 0.0
    ahead_bytes: tuple[int, ...] = ()
    captured_ms: float | None = None
    together_bytes: int | None = None
    waits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CandidateSpec:
    """What a schedule would take that the plan was weighed against; `peak_bytes` of the fullest."""

    schedule: str
    microbatches: int
    stages: int
    step_ms: float
    bubble: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class PartSpec:
    """The part of a model that the package is of: `modules`, called one after the other.

    Each further one takes as its `argument` what the one before gave, whose structure is `between`.
    `share` of the model's parameters are in them; `broken_by` is why it is not the whole model.
    """

    modules: tuple[str, ...]
    argument: str
    between: Structure
    share: float
    broken_by: str


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The optimizer that memory was planned for, in words.

    `factor` are the bytes of gradients and states for each byte of trained parameters.
    """

    text: str = "sgd: gradients only"
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that the runtime must know of a package besides its stage files and schedule.csv.

    `signature` are the names of the model's forward parameters in order; `input_structure`
    describes the dict of those that were given. `batch` is the batch it was planned for, `sizes`
    are those of the inputs' other open sizes; `conditions` say which others the model takes.
    `checked` says in which modes the captured graph was found equal to the model: "train and eval",
    "train", either with ", by the calls of torch alone" behind it for a model without memory and
    ", in float32 alone" for one that runs other ops in another dtype, or "nothing". `part` says of
    which part of a model the package is, if it is not of the whole. `candidates` are plans for
    other numbers of micro-batches, and named schedules on cuts of equal time.
    """

    format: int
    fxpipe: str
    torch: str
    model: str
    fingerprint: str
    batch: int
    sizes: dict[str, int]
    conditions: tuple[str, ...]
    microbatches: int
    schedule: str
    devices: tuple[str, ...]
    signature: tuple[str, ...]
    input_structure: Structure
    inputs: tuple[InputSpec, ...]
    output_structure: Structure
    outputs: tuple[OutputSpec, ...]
    stages: tuple[StageSpec, ...]
    state: tuple[StateSpec, ...]
    estimate: EstimateSpec
    solver: str
    gap: float | None
    checked: str
    profile: str
    files: dict[str, str]
    part: PartSpec | None = None
    optimizer: OptimizerSpec = OptimizerSpec()
    candidates: tuple[CandidateSpec, ...] = ()

    def to_json(self) -> str:
        """The text of plan.json."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read plan.json. Raises PackageError that names the field."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PackageError(f"plan.json is not JSON: {error}") from error
        if not isinstance(data, dict) or "format" not in data:
            raise PackageError("plan.json says no format: it is none that fxpipe compile wrote")
        if data["format"] != FORMAT:
            raise PackageError(
                f"plan.json has format {data['format']!r}, this fxpipe reads {FORMAT}: "
                "compile again"
            )
        return typing.cast(Manifest, read(cls, data, "plan.json"))

    @property
    def has_eval(self) -> bool:
        """Whether the pipeline computes what the model does in eval mode too."""
        return not self.checked.startswith("train") or self.checked.startswith("train and eval")

    @property
    def only_dtype(self) -> str | None:
        """The dtype that its stages are for, if the model runs other ops in another."""
        found = re.search(r", in (\w+) alone", self.checked)
        return found and found[1]

    @property
    def stage_to_device(self) -> tuple[int, ...]:
        """The index of each stage's device."""
        return tuple(stage.device for stage in self.stages)

    @property
    def written(self) -> dict[int, str]:
        """By stage, a buffer that its forward writes, where there is one."""
        stages = enumerate(self.stages)
        return {j: stage.mutated_buffers[0] for j, stage in stages if stage.mutated_buffers}


def there(mode: Mode, training: bool) -> bool:
    """Whether a value of `mode` is there in train or in eval mode."""
    return mode == "both" or (mode == "train") is training
