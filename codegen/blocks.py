"""Repeated modules become classes of the package, written once.

1. The ops of each stage are put into the tree of the module calls that made them; a call that a cut
   divides is none of it.
2. From the innermost outwards, calls that differ in nothing but numbers and in the values that they
   are given become one class. What is the same in all of them is written into the class, what
   differs is an argument of its constructor or of its forward.
3. Each call becomes one node that calls a module of that class. Chains of an nn.Sequential and runs
   over a list of modules become one node too.

A call that occurs once is written out where it stands.
"""

import keyword
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxpipe.codegen.block import Block, Design, design, varying
from fxpipe.codegen.calls import Call, call_meta, call_tree, op_counts
from fxpipe.codegen.chains import called_in_turn, joined, made_of_chain
from fxpipe.codegen.class_names import class_names
from fxpipe.codegen.crossing import crossing_names
from fxpipe.codegen.growing import grow_lists
from fxpipe.codegen.loops import fold_loops
from fxpipe.codegen.made import Made, dtypes_within, made_of_stock
from fxpipe.codegen.names import CALLED, called_values
from fxpipe.codegen.opening import find_slots
from fxpipe.codegen.parts import Facts, OutsideError, Part
from fxpipe.codegen.scope import Scope
from fxpipe.codegen.segments import mark
from fxpipe.codegen.stage_scope import StageScopes
from fxpipe.codegen.unfit import unfit_paths
from fxpipe.codegen.wording import assigned_word
from fxpipe.ir import Capture, Wiring
from fxpipe.ops.variables import GIVEN_UP

_MOST_SETTINGS = 8
_RESERVED = {*keyword.kwlist, "Tensor", "OrderedDict", "F", "nn", "torch"}


@dataclass(frozen=True, slots=True)
class Rolled:
    """The classes, those that others use first, and the stages, written with them.

    `crossing` are the names of what the stages take and hand on.
    """

    blocks: tuple[Block, ...]
    stages: tuple[Scope, ...]
    crossing: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Member:
    """One call of a group, and the call around it."""

    call: Call
    parent: Call
    part: Part


def roll(capture: Capture, wiring: Wiring) -> Rolled:
    """The repeated modules of all stages as classes."""
    return _Rolling(capture, wiring).run()


class _Rolling:
    def __init__(self, capture: Capture, wiring: Wiring) -> None:
        self.capture, self.wiring = capture, wiring
        self.graph, nodes = _copy(capture)
        mark(wiring, nodes)
        ops = [[nodes[name] for name in stage.ops] for stage in wiring.stages]
        totals = op_counts(node for stage in ops for node in stage)
        self.trees = [call_tree(stage, j, totals) for j, stage in enumerate(ops)]
        self.wanted = {name for stage in wiring.stages for name in stage.outputs}
        self.made = {path: made_of_stock(module) for path, module in capture.modules.items()}
        self.facts = Facts(
            capture.tree, capture.state, capture.saved, capture.literals, capture.specs, self.made
        )
        calls = [call for tree in self.trees for call in tree.calls()]
        self.order = {call: place for place, call in enumerate(calls)}
        self.calls = Counter(call.path for call in calls)
        self.unfit = unfit_paths(ops, self.calls, capture)
        self.became: dict[fx.Node, fx.Node] = {}
        self.blocks: list[Block] = []
        self.names: set[str] = set(_RESERVED)

    def run(self) -> Rolled:
        levels: dict[int, list[tuple[Call, Call]]] = {}
        for parent in (outer for tree in self.trees for outer in (*tree.calls(), tree)):
            for call in parent.items:
                if isinstance(call, Call):
                    levels.setdefault(call.height, []).append((call, parent))
        for _, found in sorted(levels.items(), key=lambda level: level[0]):
            self._level(found)
        stages = zip(self.trees, self.wiring.stages, strict=True)
        called = called_values(node for tree in self.trees for node in tree.nodes())
        scope = StageScopes(self.capture, self.graph, self.facts, self.made, self.wanted, called)
        made = [scope(tree, stage) for tree, stage in stages]
        crossing = crossing_names(made)
        named = tuple(one.with_crossing(crossing) for one in made)
        return Rolled(tuple(self.blocks), named, crossing)

    def _level(self, found: Sequence[tuple[Call, Call]]) -> None:
        """Make nodes, or ops of the call around them, of calls that have none within them."""
        groups: dict[tuple[Any, ...], list[_Member]] = {}
        chains = self._chains([call for call, _ in found])
        for call, parent in sorted(found, key=lambda pair: self.order[pair[0]]):
            if call in chains:
                self.made[call.path] = made_of_chain(chains[call])
                meta = call_meta(call, self.capture.tree)
                parent.replace(call, [joined(call.path, call.nodes(), meta)])
                continue
            call.items = [*fold_loops(grow_lists(call.nodes()), self.made, self.wanted)]
            part = self._part(call)
            if part is None:
                parent.replace(call, self._dissolved(call))
            else:
                kind = type(self.capture.tree[call.path])
                members = groups.setdefault((kind, part.key), [])
                members.append(_Member(call, parent, part))
        for group in groups.values():
            for members in _alike_enough(group):
                made = self._design(members)
                if made is None:
                    for member in members:
                        member.parent.replace(member.call, member.call.nodes())
                else:
                    self._use(members, made)

    def _chains(self, calls: Sequence[Call]) -> dict[Call, tuple[tuple[str, Made], ...]]:
        """The calls of an nn.Sequential, with its modules, each called as it does it.

        All calls of one are so, or none is.
        """
        found = {}
        for call in calls:
            if call.path not in self.unfit:
                module = self.capture.tree[call.path]
                chain = called_in_turn(call.path, module, call.nodes(), self.made, self.wanted)
                if chain is not None:
                    found[call] = chain
        times = Counter(call.path for call in found)
        return {call: c for call, c in found.items() if times[call.path] == self.calls[call.path]}

    def _dissolved(self, call: Call) -> list[fx.Node]:
        """The ops of a call for the call around it: what is one expression is of the line there."""
        nodes = call.nodes()
        if _is_one_expression(nodes, self.capture) and nodes[0].op != "call_module":
            meta = call_meta(call, self.capture.tree)
            if meta["source"] is not None:
                nodes[0].meta |= {"source": meta["source"], "stack": call.stack[:-1]}
        return nodes

    def _part(self, call: Call) -> Part | None:
        """What a class for `call` would be made of, if it is worth one."""
        nodes = call.nodes()
        inside = set(nodes)
        if _is_one_expression(nodes, self.capture) or call.path in self.unfit:
            return None
        read_elsewhere = (
            place
            for place, node in enumerate(nodes)
            if node.name in self.wanted or any(user not in inside for user in node.users)
        )
        path, key = call.stack[-1]
        part = Part(path, key, nodes, frozenset(read_elsewhere), call.mode(), call.region())
        try:
            find_slots(part, self.facts)
        except OutsideError:
            return None
        return part

    def _design(self, members: Sequence[_Member]) -> Design | None:
        """One class for `members`, if there can be one and it is worth it."""
        parts = [member.part for member in members]
        paths = Counter(part.path for part in parts)
        if len(members) < 2 or any(self.calls[path] > count for path, count in paths.items()):
            return None
        modules = [self.capture.tree[part.path] for part in parts]
        made = design(parts, self.facts, self.capture, modules)
        if made is not None:
            settings = {
                (r.path, repr(given)) for r, given in zip(parts, made.settings, strict=True)
            }
            if len(settings) > len(paths):
                return None  # calls of one module that differ in a number
        return made

    def _use(self, members: Sequence[_Member], made: Design) -> None:
        """Name the class, and call it in place of each of `members`."""
        parts = [member.part for member in members]
        kind = type(self.capture.tree[parts[0].path])
        paths = tuple(dict.fromkeys(part.path for part in parts))
        name = self._class_name(kind, paths, made.scope)
        self.blocks.append(Block(name, kind, made.scope, paths))
        own = {k: v.dtype for k, v in made.scope.state.items() if isinstance(v, nn.Parameter)}
        dtypes = own | dtypes_within(made.scope.made.items())
        for member, settings, inputs in zip(members, made.settings, made.inputs, strict=True):
            self.made[member.part.path] = Made(name, settings, frozenset(settings), dtypes=dtypes)
            given = tuple(self._given(value) for value in inputs)
            member.parent.replace(member.call, self._call(member, given, made.outputs))

    def _call(
        self, member: _Member, given: tuple[Any, ...], outputs: Sequence[int]
    ) -> list[fx.Node]:
        """The node that calls the class, and those that unpack what it returns."""
        part = member.part
        results = [part.nodes[place] for place in outputs]
        with self.graph.inserting_after(part.nodes[-1]):
            node = self.graph.call_module(part.path, given)
        node.meta = call_meta(member.call, self.capture.tree)
        made = [node]
        if len(results) == 1:
            line = node.meta["source"]
            called = assigned_word(line.text) if line is not None else None
            node.meta |= {} if called is None else {CALLED: called}
            self._replace(results[0], node)
        elif results:
            node.meta["val"] = tuple(result.meta.get("val") for result in results)
            for k, place in enumerate(outputs):
                if place in part.outputs:
                    with self.graph.inserting_after(made[-1]):
                        item = self.graph.call_function(operator.getitem, (node, k))
                    item.meta = {**node.meta, "stack": node.meta["stack"][:-1]}
                    self._replace(part.nodes[place], item)
                    made.append(item)
        for inner in reversed(part.nodes):
            inner.replace_all_uses_with(node)  # of those erased before
            self.graph.erase_node(inner)
        return made

    def _replace(self, result: fx.Node, node: fx.Node) -> None:
        """Let `node` stand for `result`, under its name."""
        node.meta |= {key: result.meta.get(key) for key in ("val", GIVEN_UP)}
        source = node if node.op == "call_module" else node.args[0]
        result.replace_all_uses_with(node, lambda user: user is not source)
        node.name = result.name
        self.became[result] = node

    def _given(self, value: Any) -> Any:
        """A value, or a list of values, as the call has it."""
        if isinstance(value, tuple):
            return [self._now(one) for one in value]
        return self._now(value)

    def _now(self, node: fx.Node) -> fx.Node:
        """What stands for `node` by now."""
        while node in self.became:
            node = self.became[node]
        return node

    def _class_name(self, kind: type[nn.Module], paths: Sequence[str], scope: Scope) -> str:
        others = [(tuple(b.scope.made), b.paths) for b in self.blocks if b.kind is kind]
        wished = class_names(kind.__name__, (tuple(scope.made), paths), others)
        name = next(name for name in wished if name not in self.names)
        self.names.add(name)
        return name


def _is_one_expression(nodes: Sequence[fx.Node], capture: Capture) -> bool:
    """Whether the ops are a function of one line: an activation that is a module, for example."""
    return len(nodes) == 1 and not any(
        str(used.target) in capture.state for used in nodes[0].all_input_nodes
    )


def _alike_enough(group: list[_Member]) -> Iterable[list[_Member]]:
    """The group, or if too many numbers differ in it, those with equal numbers."""
    if len(varying([member.part for member in group])) <= _MOST_SETTINGS:
        return [group]
    equal: dict[str, list[_Member]] = {}
    for member in group:
        numbers = [slot.content for slot in member.part.slots if not slot.is_value]
        equal.setdefault(repr(numbers), []).append(member)
    return equal.values()


def _copy(capture: Capture) -> tuple[fx.Graph, Mapping[str, fx.Node]]:
    """The graph anew, with the same names; what is text there reads nothing any more."""
    made = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in capture.graph.nodes:
        if node.name in capture.literals:
            new[node] = made.get_attr(node.name)
        else:
            new[node] = made.node_copy(node, new.__getitem__)
        new[node].name = node.name
        new[node].meta = dict(node.meta)
    return made, {node.name: node for node in new.values()}
