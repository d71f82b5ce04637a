"""The types between the passes. Each pass is a function from earlier ones of these to one more.

    target -> Capture -> Profile -> Chain -> Plan -> Wiring -> Package

All are frozen. A value is named after the graph node that computes it, an op likewise; bytes and
milliseconds are those of one micro-batch unless a name says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor, fx, nn

from fxpipe.runtime.manifest import Mode, TensorSpec
from fxpipe.runtime.structure import Structure
from fxpipe.schedule import Action, Schedule


class CheckpointMode(StrEnum):
    """Which micro-batches a stage recomputes in backward (torchgpipe, section 2.1)."""

    NEVER = "never"
    EXCEPT_LAST = "except_last"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class SourceLine:
    """The line of the user's code that an op comes from."""

    file: str
    line: int
    text: str


def own_storage(name: str) -> str:
    """What the memory of the model's own tensor `name` is called: like no op and no input."""
    return f"self.{name}"


@dataclass(frozen=True, slots=True)
class Op:
    """What is known of one graph node besides its place in the graph.

    `module` is the path of the module whose forward called it, `storage` the value whose memory
    its result is (itself if new), `mutates` the values, parameters and buffers it writes in place
    (the latter two by `own_storage`), and `random` says that it draws from torch's random
    generator. `mode` is the one that runs it.
    """

    name: str
    module: str
    source: SourceLine | None
    storage: str
    mutates: tuple[str, ...] = ()
    random: bool = False
    mode: Mode = "both"


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor that the user passes: its placeholder and whether it is cut into micro-batches."""

    name: str
    batched: bool


@dataclass(frozen=True, slots=True)
class Capture:
    """The model as one torch-level graph that holds its real modules, parameters and buffers.

    `get_attr` nodes read `state` under the model's own names; calls of stock `torch.nn` modules
    are `call_module` nodes on `modules`; `tree` has every module by path. A node that computes a
    size is in `literals`, as Python text in terms of `batch` and the names in `sizes`, and every
    other one but placeholders is in `ops`. `outputs` are the values of the output's tensors in the
    order of `output_structure`. `aliases` maps each further name of a tied parameter to its first;
    `saved` are the names that a state_dict has; `functions` is the text of a module that defines
    the custom autograd.Functions whose `apply` the graph calls; `dtype` is that of the model's
    parameters. `sizes` are the traced values of the inputs' other sizes that are left open, such
    as `length`, and `conditions` say, as Python text, for which others the graph holds.
    """

    model_name: str
    graph: fx.Graph
    modules: Mapping[str, nn.Module]
    tree: Mapping[str, nn.Module]
    ops: Mapping[str, Op]
    literals: Mapping[str, str]
    specs: Mapping[str, TensorSpec]
    inputs: tuple[Input, ...]
    input_structure: Structure
    signature: tuple[str, ...]
    outputs: tuple[str, ...]
    output_structure: Structure
    state: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    saved: frozenset[str]
    functions: str
    dtype: torch.dtype
    batch: int
    sizes: Mapping[str, int]
    conditions: tuple[str, ...]
    fingerprint: str
    checked: str

    def mode(self, value: str) -> Mode:
        """The modes in which `value` is computed."""
        return self.ops[value].mode if value in self.ops else "both"

    @property
    def fixed(self) -> frozenset[str]:
        """Values that are of one dtype whatever the model's own is."""
        nodes = self.graph.nodes
        return frozenset(node.name for node in nodes if node.meta.get("dtype") == "fixed")


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one op costs on one micro-batch.

    `saved` are the storages that its backward keeps: (value whose memory it is, bytes), parameters
    left out. `weight_gradient_ms` is what of `backward_ms` is for weights alone. `workspace_bytes`
    and `backward_bytes` are what forward and backward make, at their fullest. A backward in two
    halves takes `halving_ms` longer, and `arriving_bytes` of gradients wait for the second half.
    """

    forward_ms: float
    backward_ms: float
    saved: tuple[tuple[str, int], ...] = ()
    workspace_bytes: int = 0
    weight_gradient_ms: float = 0.0
    backward_bytes: int = 0
    arriving_bytes: int = 0
    halving_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class LossCost:
    """What a micro-batch's loss takes, up to its gradient, and what is there at its fullest.

    The outputs are among that for as long as they are needed.
    """

    ms: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Link:
    """Time of one message between two devices: latency_ms + bytes / bytes_per_ms.

    Processors send by themselves: a value takes `value_ms`, and each byte of it `byte_ms`, from the
    work of the one that sends it, and as much from that of the one that receives it.
    """

    latency_ms: float
    bytes_per_ms: float
    value_ms: float = 0.0
    byte_ms: float = 0.0

    def transfer_ms(self, n_bytes: int) -> float:
        """Milliseconds that a message of `n_bytes` holds the link."""
        return self.latency_ms + n_bytes / self.bytes_per_ms

    def busy_ms(self, n_values: int, n_bytes: int) -> float:
        """Milliseconds that so many values, of `n_bytes` in all, take from the work of each end."""
        return n_values * self.value_ms + n_bytes * self.byte_ms


@dataclass(frozen=True, slots=True)
class Network:
    """The link of each ordered pair of devices: `link`, but for those in `pairs`."""

    link: Link
    pairs: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def between(self, source: int, target: int) -> Link:
        """The link that messages from device `source` to device `target` take."""
        return self.pairs.get((source, target), self.link)


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs by op, the links between devices, and how they were got.

    `capacity_bytes` is what one device holds. `batch` is the micro-batch's rows. An action takes
    `action_ms` besides its ops. `loss` is what the training loss costs, where it is known.
    """

    costs: Mapping[str, OpCost]
    network: Network
    device: str
    capacity_bytes: int
    batch: int
    fingerprint: str
    origin: str = "measured"
    action_ms: float = 0.0
    loss: LossCost | None = None

    @property
    def on_processors(self) -> bool:
        """Whether the devices are processors."""
        return "cpu" in (self.device, self.origin.removeprefix("analytic:"))


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that one block computes and later blocks read. `gradient`: one flows back."""

    name: str
    bytes: int
    producer: int
    consumers: tuple[int, ...]
    gradient: bool


@dataclass(frozen=True, slots=True)
class Block:
    """Ops that must stay on one device, in order, with their cost.

    `saved` and `parameters` name storages, so that what two blocks share is counted once a stage.
    `weight_gradient_ms` is what of `backward_ms` is for weights alone. While the block runs,
    `forward_workspace_bytes`, then `backward_workspace_bytes`, are there on top of what blocks up
    to it save. A backward in two halves takes `halving_ms` longer, `arriving_bytes` of gradients
    wait for the second half, and on top of what all blocks save there are `input_workspace_bytes`,
    then `weight_workspace_bytes`. To be computed again, a forward keeps copies of the buffers it
    writes, `written_bytes`. Of the forward's workspace are the values `waiting`, of earlier blocks,
    and of the backward's and its first half's the gradients of the values `returning`.
    """

    ops: tuple[str, ...]
    forward_ms: float
    backward_ms: float
    saved: tuple[tuple[str, int], ...] = ()
    parameters: tuple[tuple[str, int], ...] = ()
    buffers: tuple[tuple[str, int], ...] = ()
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    weight_gradient_ms: float = 0.0
    arriving_bytes: int = 0
    halving_ms: float = 0.0
    written_bytes: int = 0
    input_workspace_bytes: int = 0
    weight_workspace_bytes: int = 0
    waiting: frozenset[str] = frozenset()
    returning: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks in execution order; a stage is a run of them.

    `cuttable[k]` says whether a stage may end after block k (the last block always may). Values
    are those read by another block than their producer's, or, as block `len(blocks)`, by the
    caller; model inputs (producer -1) go straight from the caller to each stage that reads them.
    `divides[k]` is the number of the model's modules that a cut after block k would divide; a bare
    chain has none. An action of a stage takes `action_ms` besides its blocks.
    """

    blocks: tuple[Block, ...]
    values: tuple[Value, ...]
    cuttable: tuple[bool, ...]
    divides: tuple[int, ...] = ()
    action_ms: float = 0.0

    def crossing(self, k: int) -> tuple[Value, ...]:
        """The values that a cut after block k sends on."""
        blocks = range(k + 1, len(self.blocks))
        return tuple(
            v for v in self.values if 0 <= v.producer <= k and any(c in blocks for c in v.consumers)
        )


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """What the plan predicts of one stage; times and saved bytes are of one micro-batch."""

    forward_ms: float
    backward_ms: float
    parameter_bytes: int
    saved_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator predicts of one training step.

    `spans` has the shape of the schedule's rows: when each action begins and ends, in ms. `memory`
    is what each device holds over time: (ms, bytes) at first and after each change. `critical` are
    the actions that the step's length hangs on, in order of time.
    """

    step_ms: float
    bubble: float
    peak_bytes: tuple[int, ...]
    spans: tuple[tuple[tuple[float, float], ...], ...]
    stages: tuple[StageEstimate, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...] = ()
    critical: tuple[Action, ...] = ()


# The schedule's name where the table is the user's own.
GIVEN = "given"


@dataclass(frozen=True, slots=True)
class Plan:
    """Cuts, schedule and recomputation together, with what they are predicted to cost.

    `cuts[j]` is the number of blocks before stage j+1; stage j runs on `stage_to_device[j]`, and
    recomputes the blocks [begin, end) of each of its `segments`, each segment in one piece, in
    the backward of every micro-batch.
    `bound_ms` is a proven lower bound on the step time of any plan with this schedule, where the
    solver gives one.
    """

    cuts: tuple[int, ...]
    stage_to_device: tuple[int, ...]
    schedule_name: str
    schedule: Schedule
    checkpoint: tuple[CheckpointMode, ...]
    estimate: Estimate
    solver: str
    bound_ms: float | None = None
    segments: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def gap(self) -> float | None:
        """How far the predicted step lies above the bound, as a share of the step."""
        if self.bound_ms is None or self.estimate.step_ms == 0:
            return None
        return max(0.0, 1 - self.bound_ms / self.estimate.step_ms)


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
