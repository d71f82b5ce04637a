"""Names of the values that cross: each has one, in the stage that makes it and in those after."""

from collections.abc import Mapping, Sequence

from fxpipe.codegen.functions import function_called
from fxpipe.codegen.loops import item_of, read_throughout
from fxpipe.codegen.names import base_name, last_uses
from fxpipe.codegen.scope import Scope


def crossing_names(stages: Sequence[Scope]) -> dict[str, str]:
    """A variable for each value that a stage takes or hands on, by value.

    Two that some stage has at once have different ones. The last of its name that a stage makes,
    with which the model goes on, has no number if it can; the others are numbered as they are made.
    """
    functions = {function_called(node) for stage in stages for node in stage.nodes}
    apart: dict[str, set[str]] = {}
    made = [value for stage in stages for value in stage.outputs]
    given = [value for stage in stages for value in stage.inputs if value not in made]
    called: dict[str, str] = {}
    for stage in stages:
        called |= stage.called
        for group in _at_once(stage):
            for value in group:
                apart.setdefault(value, set()).update(set(group) - {value})
    base = {value: base_name(called.get(value, value)) for value in (*given, *made)}
    last = {value for stage in stages for value in _last(stage, base)}
    names: dict[str, str] = {}
    for value in (*given, *(v for v in made if v in last), *(v for v in made if v not in last)):
        name = own = f"{base[value]}_" if base[value] in functions else base[value]
        number = 1
        while name in {names.get(other) for other in apart.get(value, ())}:
            number += 1
            name = f"{own}_{number}"
        names.setdefault(value, name)
    return names


def _at_once(stage: Scope) -> list[Sequence[str]]:
    """Groups of values that the stage has at once: what it takes, what it returns, and pairs."""
    ends = last_uses(stage.nodes, stage.outputs, read_throughout(stage.nodes))
    made = {node.name: place for place, node in enumerate(stage.nodes)}
    pairs = [
        (taken, result)
        for taken in stage.inputs
        for result in stage.outputs
        if ends.get(taken, 0) > made[result]
    ]
    return [stage.inputs, stage.outputs, *pairs]


def _last(stage: Scope, base: Mapping[str, str]) -> set[str]:
    """Of the results that are called alike the last one made."""
    results = (node for node in stage.nodes if node.name in stage.outputs)
    made = [node.name for node in results if node.target is not item_of]  # it stays in a list
    return {*{base[value]: value for value in made}.values()}
