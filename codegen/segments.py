"""Segments: parts of a stage that its code has computed again in backward.

One that is a call of a module is that call, through `checkpoint`. Any other is a method of the
stage's class, called so.
"""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import fx

from fxpipe.codegen.calls import SEGMENT
from fxpipe.codegen.growing import grow_lists
from fxpipe.codegen.loops import CHECKPOINT, fold_loops, item_of
from fxpipe.codegen.names import CALLED
from fxpipe.codegen.parts import Facts
from fxpipe.ir import Capture, Wiring
from fxpipe.ops.interpret import MODE
from fxpipe.ops.local_sizes import local_sizes
from fxpipe.ops.specs import where_told
from fxpipe.runtime.manifest import SegmentSpec


@dataclass(frozen=True, slots=True)
class Method:
    """A segment as a method: its ops, the values that it takes, and those that it returns.

    `mode` is the one that all its ops are of, if there is one.
    """

    name: str
    nodes: Sequence[fx.Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mode: bool | None


def mark(wiring: Wiring, nodes: Mapping[str, fx.Node]) -> None:
    """Let each op of a segment say so."""
    for stage in wiring.stages:
        for segment, names in enumerate(stage.segments):
            for name in names:
                nodes[name].meta[SEGMENT] = segment


def segment_spec(capture: Capture, names: Sequence[str]) -> SegmentSpec:
    """What the ops `names` are called: by the largest modules that are whole in them."""
    others = [op.module for name, op in capture.ops.items() if name not in names]

    def within(name: str) -> str:
        parts = capture.ops[name].module.split(".")
        above = (".".join(parts[: k + 1]) for k in range(len(parts)))
        whole = (path for path in above if not any(f"{o}.".startswith(f"{path}.") for o in others))
        return next(whole, name)

    return SegmentSpec(within(names[0]), within(names[-1]), len(names))


def segment_of(nodes: Sequence[fx.Node]) -> int:
    """The number in its stage of the segment that `nodes` are."""
    number: int = nodes[0].meta[SEGMENT]
    return number


def recomputed(method: str, *values: Any) -> Any:
    """Stands in a graph for the call of a method through `checkpoint`."""
    raise AssertionError("it is written as a call of the method, never run")


def set_apart(
    nodes: Sequence[fx.Node], facts: Facts, wanted: Collection[str], given: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[Method]]:
    """`nodes` with each segment as what is called through `checkpoint`, and the methods for it.

    Values in `wanted` are read elsewhere; `given` are those that tell the stage sizes.
    """
    outer: list[fx.Node] = []
    methods: list[Method] = []
    free = (f"recomputed_{k}" for k in range(1, len(nodes) + len(facts.tree) + 2))
    for segment, group in groupby(nodes, key=lambda node: node.meta.get(SEGMENT)):
        members = list(group)
        if segment is None:
            outer += members
        elif _is_one_call(members):
            members[0].meta[CHECKPOINT] = True
            outer += members
        else:
            inner = fold_loops(grow_lists(members), facts.made, wanted)
            name = next(name for name in free if name not in facts.tree)
            returned = _returned(inner, wanted)
            taken = _taken(inner, facts, given)
            methods.append(_method(name, inner, taken, returned))
            outer += _call(methods[-1], taken, returned)
    return outer, methods


def _is_one_call(nodes: Sequence[fx.Node]) -> bool:
    """Whether they are a call of one module and what unpacks its results."""
    first, *others = nodes
    return (
        first.op == "call_module"
        and not first.kwargs
        and all(node.target is operator.getitem and node.args[0] is first for node in others)
    )


def _taken(nodes: Sequence[fx.Node], facts: Facts, given: Sequence[fx.Node]) -> list[fx.Node]:
    """The values from outside, in the order of their use, then what tells sizes beside them."""
    inside = set(nodes)
    read = dict.fromkeys(used for node in nodes for used in node.all_input_nodes)
    taken = [used for used in read if used not in inside and used.op != "get_attr"]
    known = local_sizes(facts.specs[node.name] for node in taken if MODE not in node.meta)
    texts = [facts.literals.get(used.name, "") for used in read]
    for size in (size for text in texts for size in known.missing(text)):
        if not any(where_told(facts.specs[node.name], size) for node in taken):
            taken.append(next(n for n in given if where_told(facts.specs[n.name], size)))
    return taken


def _returned(nodes: Sequence[fx.Node], wanted: Collection[str]) -> list[fx.Node]:
    """What others read, collected results of loops behind the rest."""
    inside = set(nodes)
    found = [n for n in nodes if n.name in wanted or any(u not in inside for u in n.users)]
    return sorted(found, key=lambda node: node.target is item_of)


def _method(
    name: str,
    nodes: Sequence[fx.Node],
    taken: Sequence[fx.Node],
    returned: Sequence[fx.Node],
) -> Method:
    modes = {node.meta.get(MODE) for node in nodes}
    mode = modes.pop() if len(modes) == 1 else None
    return Method(
        name,
        nodes,
        tuple(node.name for node in taken),
        tuple(node.name for node in returned),
        mode,
    )


def _call(
    method: Method, taken: Sequence[fx.Node], returned: Sequence[fx.Node]
) -> Iterator[fx.Node]:
    """The node that calls the method, and those that unpack what it returns."""
    last = method.nodes[-1]
    inside = set(method.nodes)
    with last.graph.inserting_after(last):
        node = last.graph.call_function(recomputed, (method.name, *taken))
    meta: dict[str, Any] = {} if method.mode is None else {MODE: method.mode}
    node.meta = {CHECKPOINT: True, **meta}
    yield node
    results = [node]
    if len(returned) == 1:
        node.name, node.meta["val"] = returned[0].name, returned[0].meta.get("val")
    else:
        node.meta["val"] = tuple(result.meta.get("val") for result in returned)
        results = []
        for k, result in enumerate(returned):
            with last.graph.inserting_after(results[-1] if results else node):
                item = last.graph.call_function(operator.getitem, (node, k))
            item.name, item.meta["val"] = result.name, result.meta.get("val")
            results.append(item)
        yield from results
    for result, stand_in in zip(returned, results, strict=bool(returned)):
        if CALLED in result.meta:
            stand_in.meta[CALLED] = result.meta[CALLED]
        readers = [user for user in result.users if user not in inside]
        for reader in readers:
            reader.replace_input_with(result, stand_in)
