"""Lists that grow: `features.append(layer(features))` in place of ever longer lists."""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpipe.ops.source import calls_around
from fxpipe.ops.variables import GIVEN_UP

_FEWEST = 3  # lists that must be one and the same, grown, before it is worth a variable


@dataclass(slots=True)
class _Chain:
    """One list as it grows: where it is read, and what it holds by then."""

    reads: list[tuple[fx.Node, int]]
    values: list[fx.Node]


def new_list(values: Sequence[fx.Node]) -> list[fx.Node]:
    """Stands in a graph for a list that later ops append to."""
    return list(values)


def grow_lists(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """`nodes`, with lists that only grow from one op to the next as one list each."""
    place = {node: k for k, node in enumerate(nodes)}
    grown = list(nodes)
    for chain in _chains(nodes, place):
        first, argument = chain.reads[0]
        begun = list(first.args[argument])  # type: ignore[arg-type]
        with first.graph.inserting_before(first):
            made = first.graph.call_function(new_list, (begun,))
        made.name = first.graph._graph_namespace.create_name(_name(chain), None)
        made.meta = _without_value(first)
        made.meta["stack"] = calls_around(first)
        grown.insert(grown.index(first), made)
        for node, k in chain.reads:
            node.update_arg(k, made)
        for value in chain.values[len(begun) :]:
            _append(made, value, grown)
        held = [value.meta.pop(GIVEN_UP, None) for value in chain.values]  # the list holds it
        if any(held):
            made.meta[GIVEN_UP] = made.name
    return grown


def _chains(nodes: Sequence[fx.Node], place: dict[fx.Node, int]) -> list[_Chain]:
    chains: list[_Chain] = []
    for node in nodes:
        for k, argument in enumerate(node.args):
            if not isinstance(argument, list) or not argument:
                continue
            values = [value for value in argument if isinstance(value, fx.Node)]
            if len(values) == len(argument):
                chain = next((c for c in chains if _grows(c, values, place)), None)
                if chain is None:
                    chains.append(_Chain([(node, k)], values))
                else:
                    chain.reads.append((node, k))
                    chain.values = values
    return [chain for chain in chains if len(chain.reads) >= _FEWEST and _varies(chain)]


def _grows(chain: _Chain, values: Sequence[fx.Node], place: dict[fx.Node, int]) -> bool:
    """Whether the list, by appending what was made since it was last read, becomes `values`."""
    known, last = len(chain.values), place[chain.reads[-1][0]]
    fresh = values[known:]
    return list(values[:known]) == chain.values and all(place.get(v, -1) >= last for v in fresh)


def _varies(chain: _Chain) -> bool:
    lengths = {len(node.args[k]) for node, k in chain.reads}  # type: ignore[arg-type]
    return len(lengths) >= _FEWEST


def _append(made: fx.Node, value: fx.Node, grown: list[fx.Node]) -> None:
    """Append `value` once it is there, and all that is unpacked together with it."""
    at = grown.index(value)
    if value.target is operator.getitem:
        while at + 1 < len(grown) and _unpacks(grown[at + 1], value.args[0]):
            at += 1
    with made.graph.inserting_after(grown[at]):
        node = made.graph.call_method("append", (made, value))
    node.meta = _without_value(value)
    node.meta["stack"] = calls_around(value)
    grown.insert(at + 1, node)


def _without_value(node: fx.Node) -> dict[str, Any]:
    """What is known of an op besides what it computes."""
    return {key: known for key, known in node.meta.items() if key not in ("val", GIVEN_UP)}


def _unpacks(node: fx.Node, source: object) -> bool:
    return node.target is operator.getitem and node.args[0] is source


def _name(chain: _Chain) -> str:
    """What the user's line that reads the list calls it: `features` in `layer(features)`."""
    for node, _ in chain.reads:
        source = node.meta.get("source")
        found = re.search(r"\((\w+)[,)]", source.text) if source is not None else None
        if found and found[1].isidentifier() and found[1] != "self":
            return found[1]
    return "values"
