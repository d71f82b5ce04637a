"""Loops: modules of one list, called one after the other, as one node of the graph."""

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx

from fxpipe.codegen.made import Made
from fxpipe.codegen.names import base_name
from fxpipe.ops.interpret import MODE

LOOP = "loop"  # the key of a node's meta that holds its Loop
CHECKPOINT = "checkpoint"  # that of what is called through `checkpoint`


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls of the modules `container.numbers[0]`, `container.numbers[1]`, ...

    `carried` says for each argument which result of the call before it is; None: it is the same
    in all calls. `collected` are the results that are read of every call, not of the last alone.
    `count` is what stands in code for the number of calls.
    """

    numbers: tuple[int, ...]
    made: tuple[Made, ...]
    carried: tuple[int | None, ...]
    collected: tuple[int, ...]
    count: Any

    @property
    def uniform(self) -> bool:
        """Whether all modules are made alike."""
        return len({str(made) for made in self.made}) == 1


@dataclass(frozen=True, slots=True)
class _Step:
    """One call, and the nodes that unpack its results by number."""

    node: fx.Node
    items: dict[int, fx.Node]
    container: str
    number: int

    def results(self) -> dict[int, fx.Node]:
        """What the call gives, by number."""
        return self.items or {0: self.node}

    def result(self, value: Any) -> int | None:
        """Which result of the call `value` is."""
        return next((number for number, one in self.results().items() if one is value), None)


def fold_loops(
    nodes: Sequence[fx.Node], made: Mapping[str, Made], wanted: Collection[str]
) -> list[fx.Node]:
    """`nodes` with each run of such calls as one node; values in `wanted` are read elsewhere."""
    folded: list[fx.Node] = []
    place = 0
    while place < len(nodes):
        steps, carried = _run(nodes, place, made)
        size = sum(1 + len(step.items) for step in steps)
        if len(steps) < (2 if _ours(steps, made) else 3):
            folded.append(nodes[place])
            place += 1
            continue
        folded += _fold(steps, made, carried, wanted)
        place += size
    return folded


def item_of(results: Any, result: int, call: int) -> Any:
    """Stands in a graph for a collected result of one call of a loop."""
    raise AssertionError("it is written as an index, never run")


def called_modules(node: fx.Node) -> tuple[str, ...]:
    """The paths of the modules that a node calls."""
    if node.op != "call_module":
        return ()
    loop: Loop | None = node.meta.get(LOOP)
    return tuple(f"{node.target}.{k}" for k in loop.numbers) if loop else (str(node.target),)


def read_throughout(nodes: Iterable[fx.Node]) -> dict[str, list[str]]:
    """By loop, the values that each of its calls is given as they are before it."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        if LOOP in node.meta:
            pairs = zip(node.args, node.meta[LOOP].carried, strict=True)
            values: list[fx.Node] = []
            fx.map_arg([argument for argument, result in pairs if result is None], values.append)
            found[node.name] = [value.name for value in values]
    return found


def collected_names(nodes: Iterable[fx.Node], names: Mapping[str, str]) -> dict[str, str]:
    """Lists of the collected results of loops, by "loop.result", and items of them, by value."""
    found: dict[str, str] = {}
    for node in nodes:
        if node.target is item_of:
            loop, result, call = node.args
            assert isinstance(loop, fx.Node)
            key = f"{loop.name}.{result}"
            if key not in found:
                own = base_name(node.name)
                wished = [f"all_{own}", *(f"all_{own}_{k}" for k in range(2, len(names) + 3))]
                taken = {*names.values(), *found.values()}
                found[key] = next(name for name in wished if name not in taken)
            found[node.name] = f"{found[key]}[{call}]"
    return found


def _fold(
    steps: Sequence[_Step],
    made: Mapping[str, Made],
    carried: tuple[int | None, ...],
    wanted: Collection[str],
) -> list[fx.Node]:
    """The steps as one node, the last one's, and those that unpack what it gives."""
    last = steps[-1]
    collected = {
        result
        for step, after in pairwise(steps)
        for result, node in step.results().items()
        if node.name in wanted or any(user is not after.node for user in node.users)
    }
    items = [
        _item(last, step.results()[result], result, call)
        for result in sorted(collected)
        for call, step in enumerate(steps)
        if result in step.results() and (step is not last or result not in carried)
    ]
    loop = Loop(
        tuple(step.number for step in steps),
        tuple(made[str(step.node.target)] for step in steps),
        carried,
        tuple(sorted(collected)),
        len(steps),
    )
    last.node.args, last.node.target = steps[0].node.args, last.container
    last.node.meta = {**last.node.meta, LOOP: loop}
    for step in reversed(steps[:-1]):
        for node in step.items.values():
            node.graph.erase_node(node)
        step.node.graph.erase_node(step.node)
    return [last.node, *last.items.values(), *items]


def _item(last: _Step, node: fx.Node, result: int, call: int) -> fx.Node:
    """The node that stands for `node`, a collected result, behind the loop."""
    end = list(last.items.values())[-1] if last.items else last.node
    with last.node.graph.inserting_after(end):
        item = last.node.graph.call_function(item_of, (last.node, result, call))
    readers = [user for user in node.users if user is not item and user.target is not item_of]
    for user in readers:
        user.replace_input_with(node, item)
    item.name, item.meta = node.name, {**last.node.meta, "val": node.meta.get("val")}
    node.name = f"{node.name}_0"  # what one call gives; its number goes in code
    item.meta["stack"] = last.node.meta["stack"][:-1]
    return item


def _ours(steps: Sequence[_Step], made: Mapping[str, Made]) -> bool:
    """Whether the calls are of a class of the package rather than of torch.nn."""
    return bool(steps) and made[str(steps[0].node.target)].stock is None


def _run(
    nodes: Sequence[fx.Node], place: int, made: Mapping[str, Made]
) -> tuple[list[_Step], tuple[int | None, ...]]:
    """The longest loop that begins with the node at `place`."""
    steps: list[_Step] = []
    carried: tuple[int | None, ...] = ()
    while place < len(nodes) and (step := _step(nodes, place, made)) is not None:
        if steps:
            links = _links(steps[-1], step, made)
            if links is None or (len(steps) > 1 and links != carried):
                break
            carried = links
        steps.append(step)
        place += 1 + len(step.items)
    return steps, carried


def _step(nodes: Sequence[fx.Node], place: int, made: Mapping[str, Made]) -> _Step | None:
    node = nodes[place]
    container, _, number = str(node.target).rpartition(".")
    if node.op != "call_module" or LOOP in node.meta or not number.isdecimal() or node.kwargs:
        return None
    if not container or str(int(number)) != number or str(node.target) not in made:
        return None
    items: dict[int, fx.Node] = {}
    if isinstance(node.meta.get("val"), tuple | list):
        for item in nodes[place + 1 : place + 1 + len(node.users)]:
            if item.target is operator.getitem and item.args[0] is node:
                result = item.args[1]
                assert isinstance(result, int)
                items[result] = item
    if items and len(items) != len(node.users):
        return None
    return _Step(node, items, container, int(number))


def _links(before: _Step, step: _Step, made: Mapping[str, Made]) -> tuple[int | None, ...] | None:
    """How the arguments of a step come from the one before, if both can be of one loop."""
    first, second = made[str(before.node.target)], made[str(step.node.target)]
    alike = (
        step.container == before.container
        and step.number == before.number + 1
        and first.name == second.name
        and first.key() == second.key()
        and len(step.node.args) == len(before.node.args)
        and step.node.meta.get(MODE) == before.node.meta.get(MODE)
        and step.node.meta.get(CHECKPOINT) == before.node.meta.get(CHECKPOINT)
        and set(step.items) >= set(before.items)
    )
    if not alike:
        return None
    links: list[int | None] = []
    begins: dict[int, Any] = {}
    for ours, theirs in zip(step.node.args, before.node.args, strict=True):
        result = before.result(ours)
        if result is None and not (ours is theirs or ours == theirs):
            return None
        # A result has one variable, so it can't be two arguments that begin apart.
        if result is not None and begins.setdefault(result, theirs) is not theirs:
            return None
        links.append(result)
    return tuple(links) if any(link is not None for link in links) else None
