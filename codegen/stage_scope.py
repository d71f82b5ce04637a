"""A stage's scope, from its ops in which calls of classes are nodes by now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxpipe.codegen.calls import Call
from fxpipe.codegen.growing import grow_lists
from fxpipe.codegen.loops import called_modules, fold_loops, item_of
from fxpipe.codegen.made import Made
from fxpipe.codegen.parts import Facts
from fxpipe.codegen.scope import Scope
from fxpipe.codegen.segments import set_apart
from fxpipe.ir import Capture, StageWiring
from fxpipe.ops.interpret import MODE
from fxpipe.ops.local_sizes import local_sizes


@dataclass(frozen=True, slots=True)
class StageScopes:
    """Makes the scopes of stages. `wanted` are values that some stage hands on."""

    capture: Capture
    graph: fx.Graph
    facts: Facts
    made: Mapping[str, Made]
    wanted: set[str]
    called: Mapping[str, str]

    def __call__(self, tree: Call, stage: StageWiring) -> Scope:
        """That of the stage whose calls are `tree`."""
        inputs, outputs = tuple(port.value for port in stage.inputs), stage.outputs
        values = {node.name: node for node in self.graph.nodes}
        given = [values[name] for name in inputs if self.capture.mode(name) == "both"]
        nodes, methods = set_apart(tree.nodes(), self.facts, self.wanted, given)
        nodes = fold_loops(grow_lists(nodes), self.made, self.wanted)
        collected = [node.name for node in nodes if node.target is item_of]
        outputs = (
            *(name for name in outputs if name not in collected),
            *(name for name in collected if name in outputs),
        )
        every = [*nodes, *(node for method in methods for node in method.nodes)]
        made = {path: self.made[path] for node in every for path in called_modules(node)}
        scopes = {}
        for method in methods:
            always = method.mode is not None  # it is called in that mode alone
            for node in method.nodes:
                node.meta.update({MODE: None} if always else {})
            scopes[method.name] = self._scope(
                method.nodes, method.inputs, method.outputs, made, always
            )
        return replace(self._scope(nodes, inputs, outputs, made), methods=scopes)

    def _scope(
        self,
        nodes: Sequence[fx.Node],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        made: Mapping[str, Made],
        always: bool = False,
    ) -> Scope:
        specs = self.capture.specs
        crossing = () if always else (*inputs, *outputs)
        modes = {v: m for v in crossing if (m := self.capture.mode(v)) != "both"}
        sizes = local_sizes(specs[v] for v in inputs if v not in modes)
        values = (*inputs, *(node.name for node in nodes), *outputs)
        read = [used.name for node in nodes for used in node.all_input_nodes]
        literals = {
            name: sizes.text(text) or text
            for name in read
            if (text := self.capture.literals.get(name)) is not None
        }
        return Scope(
            path="",
            nodes=tuple(nodes),
            inputs=inputs,
            outputs=outputs,
            made=made,
            tree=self.capture.tree,
            state=self.capture.state,
            shapes={},
            saved=self.capture.saved,
            literals=literals,
            texts=tuple(literals.values()),
            specs={name: sizes.spec(specs[name]) for name in values if name in specs},
            lists=frozenset(),
            fixed=self.capture.fixed,
            modes=modes,
            settings={},
            called=self.called,
        )
