"""What a class of the package is written from, be it a stage or a repeated module."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.codegen.made import Made
from fxpipe.codegen.segments import recomputed
from fxpipe.runtime.manifest import Mode, TensorSpec


@dataclass(frozen=True, slots=True)
class Scope:
    """Ops with their inputs and outputs (names of values), and what they use of the model.

    `made` are the modules that they call, `tree` all modules and `state` the tensors that they
    read, by name from here on; `shapes` the shapes of those tensors, as code where they differ
    between instances; `saved` those that a state_dict has. `literals` are nodes that are text,
    `texts` what is read of them. `specs` are those of values, as far as they are the same in all
    instances. `settings` are arguments of the constructor, each with a value that it has. `modes`
    has those inputs and outputs that are there in one mode only, `lists` those inputs that are a
    list of tensors, `fixed` those whose dtype is not the model's own, be it equal. `called` are the
    variables that the user's lines assign values to, where these tell more than the values' own
    names, `crossing` the names of what stages take and hand on. `methods` are parts that stand in
    methods of their own, whose ops are not in `nodes`.
    """

    path: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    made: Mapping[str, Made]
    tree: Mapping[str, nn.Module]
    state: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[Any, ...]]
    saved: frozenset[str]
    literals: Mapping[str, str]
    texts: tuple[str, ...]
    specs: Mapping[str, TensorSpec]
    modes: Mapping[str, Mode]
    lists: frozenset[str]
    fixed: frozenset[str]
    settings: Mapping[str, Any]
    called: Mapping[str, str]
    crossing: Mapping[str, str] = field(default_factory=dict)
    methods: Mapping[str, "Scope"] = field(default_factory=dict)

    @property
    def all_nodes(self) -> tuple[fx.Node, ...]:
        """The ops of the class, those of its methods where they are called."""
        return tuple(
            one
            for node in self.nodes
            for one in (
                self.methods[str(node.args[0])].nodes if node.target is recomputed else (node,)
            )
        )

    def with_crossing(self, names: Mapping[str, str]) -> "Scope":
        """The same, in whose methods what crosses has these names."""
        methods = {name: own.with_crossing(names) for name, own in self.methods.items()}
        return replace(self, crossing=names, methods=methods)
