"""Loops: modules of one list, called one after the other, as one node of the graph."""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpipe.codegen.made import Made
from fxpipe.interpret import MODE

LOOP = "loop"  # the key of a node's meta that holds its Loop


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls of the modules `container.numbers[0]`, `container.numbers[1]`, ...

    `carried` says for each argument which result of the call before it is; None: it is the same
    in all calls. `count` is what stands in code for the number of calls.
    """

    numbers: tuple[int, ...]
    made: tuple[Made, ...]
    carried: tuple[int | None, ...]
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

    def result(self, value: Any) -> int | None:
        """Which result of the call `value` is."""
        if value is self.node and not self.items:
            return 0
        return next((number for number, item in self.items.items() if item is value), None)


def fold_loops(
    nodes: Sequence[fx.Node], made: Mapping[str, Made], wanted: Collection[str]
) -> list[fx.Node]:
    """`nodes` with each run of such calls as one node; values in `wanted` are read elsewhere."""
    folded: list[fx.Node] = []
    place = 0
    while place < len(nodes):
        steps, carried = _run(nodes, place, made, wanted)
        size = sum(1 + len(step.items) for step in steps)
        if len(steps) < (2 if _ours(steps, made) else 3):
            folded.append(nodes[place])
            place += 1
            continue
        last = steps[-1]
        loop = Loop(
            tuple(step.number for step in steps),
            tuple(made[str(step.node.target)] for step in steps),
            carried,
            len(steps),
        )
        last.node.args, last.node.target = steps[0].node.args, last.container
        last.node.meta = {**last.node.meta, LOOP: loop}
        for step in reversed(steps[:-1]):
            for item in step.items.values():
                item.graph.erase_node(item)
            step.node.graph.erase_node(step.node)
        folded += [last.node, *last.items.values()]
        place += size
    return folded


def _ours(steps: Sequence[_Step], made: Mapping[str, Made]) -> bool:
    """Whether the calls are of a class of the package rather than of torch.nn."""
    return bool(steps) and made[str(steps[0].node.target)].stock is None


def _run(
    nodes: Sequence[fx.Node], place: int, made: Mapping[str, Made], wanted: Collection[str]
) -> tuple[list[_Step], tuple[int | None, ...]]:
    """The longest loop that begins with the node at `place`."""
    steps: list[_Step] = []
    carried: tuple[int | None, ...] = ()
    while place < len(nodes) and (step := _step(nodes, place, made)) is not None:
        if steps:
            links = _links(steps[-1], step, made)
            if links is None or (len(steps) > 1 and links != carried):
                break
            if not _only_next(steps[-1], step, links, wanted):
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
        and set(step.items) >= set(before.items)
    )
    if not alike:
        return None
    links: list[int | None] = []
    for ours, theirs in zip(step.node.args, before.node.args, strict=True):
        result = before.result(ours)
        if result is None and not (ours is theirs or ours == theirs):
            return None
        links.append(result)
    return tuple(links) if any(link is not None for link in links) else None


def _only_next(
    before: _Step, step: _Step, links: Sequence[int | None], wanted: Collection[str]
) -> bool:
    """Whether nobody but the next step reads what a step gives."""
    results = before.items or {0: before.node}
    return all(
        result.name not in wanted and all(user is step.node for user in result.users)
        for result in results.values()
    )
