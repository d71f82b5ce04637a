"""What capture found: the model as a graph, its ops, its inputs and outputs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from fxpipe.runtime.manifest import Mode, TensorSpec
from fxpipe.runtime.structure import Structure


@dataclass(frozen=True, slots=True)
class SourceLine:
    """The line of the user's code that an op comes from."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.text}"


def own_storage(name: str) -> str:
    """What the memory of the model's own tensor `name` is called: like no op and no input."""
    return f"self.{name}"


@dataclass(frozen=True, slots=True)
class Op:
    """What is known of one graph node besides its place in the graph.

    `module` is the path of the module whose forward called it, `storage` the value whose memory
    its result is (itself if new), `mutates` the values, parameters and buffers it writes in place
    (the latter two by `own_storage`), and `random` says that it draws from torch's random
    generator. `mode` is the one that runs it. In the other mode, or with other sizes or dtypes, the
    result's memory may be one of `may_share` instead.
    """

    name: str
    module: str
    source: SourceLine | None
    storage: str
    mutates: tuple[str, ...] = ()
    random: bool = False
    mode: Mode = "both"
    may_share: tuple[str, ...] = ()

    @property
    def memories(self) -> tuple[str, ...]:
        """All that its result's memory may be."""
        return (self.storage, *self.may_share)


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
    as `length`, and `conditions` say, as Python text, for which others the graph holds. `mixed`
    says where forward mixes rows of the batch, if it does.
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
    mixed: str

    def mode(self, value: str) -> Mode:
        """The modes in which `value` is computed."""
        return self.ops[value].mode if value in self.ops else "both"

    def first_name(self, name: str) -> str:
        """The first name of a parameter or buffer, which may be tied to others."""
        return self.aliases.get(name, name)

    def memories(self, node: fx.Node) -> tuple[str, ...]:
        """All that the memory of what `node` makes, or reads of the model, may be."""
        if node.op == "get_attr":
            return (own_storage(self.first_name(str(node.target))),)
        return self.ops[node.name].memories if node.name in self.ops else (node.name,)

    @property
    def fixed(self) -> frozenset[str]:
        """Values that are of one dtype whatever the model's own is."""
        nodes = self.graph.nodes
        return frozenset(node.name for node in nodes if node.meta.get("dtype") == "fixed")

    @property
    def formals(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """By value and by the key of a call in `stack`, as which parameters forward is given it.

        `*xs` if it is an item of that.
        """
        return {node.name: node.meta.get("formals", {}) for node in self.graph.nodes}
