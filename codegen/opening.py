"""A part of the graph opened: its ops with its slots filled, named from its module on."""

import inspect
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from fxpipe.codegen.loops import LOOP, Loop
from fxpipe.codegen.made import Made, Written, is_number, made_whole
from fxpipe.codegen.parts import Facts, Opened, OpenedOp, OutsideError, Part, Slot, Substitute
from fxpipe.ops.interpret import MODE
from fxpipe.ops.local_sizes import local_sizes
from fxpipe.ops.regions import PLAIN, REGION
from fxpipe.runtime.manifest import TensorSpec


def find_slots(part: Part, facts: Facts) -> None:
    """Set the key, the slots and the sizes of `part`. Raises OutsideError."""

    def note(slot: Slot) -> Any:
        part.slots.append(slot)
        return slot.content

    part.sizes = local_sizes(_told(part, facts))
    part.key = open_part(part, facts, note).key


def open_part(part: Part, facts: Facts, fill: Substitute) -> Opened:
    """`part` with each slot as `fill` has it, asked in their order. Raises OutsideError."""
    return _Opening(part, facts, fill).run()


class _Opening:
    def __init__(self, part: Part, facts: Facts, fill: Substitute) -> None:
        self.part, self.facts, self.fill = part, facts, fill
        self.places = {node: place for place, node in enumerate(part.nodes)}
        self.prefix = f"{part.path}."
        self.read: dict[str, set[str]] = {}
        for used in (used for node in part.nodes for used in node.all_input_nodes):
            if used.op == "get_attr" and str(used.target) in facts.state:
                owner, _, last = str(used.target).rpartition(".")
                self.read.setdefault(owner, set()).add(last)
        self.made: dict[str, Made] = {}
        self.tensors: dict[str, None] = {}
        self.loops: dict[fx.Node, Loop] = {}
        self.shapes: dict[str, tuple[Any, ...]] = {}
        self.texts: list[str] = []
        self.key: list[Any] = []
        self.place = 0

    def run(self) -> Opened:
        ops = [self._op(node) for node in self.part.nodes]
        return Opened(
            ops, self.made, self.loops, [*self.tensors], self.shapes, self.texts, tuple(self.key)
        )

    def _op(self, node: fx.Node) -> OpenedOp:
        target: Any = node.target
        if node.op == "call_module":
            target = self._module(str(node.target), node)
        names = _argument_names(node)
        self.place = -1 if node.op == "call_method" else 0  # the owner of a method is none
        skeleton: list[str] = []
        args = tuple(
            self._argument(arg, name, node, skeleton)
            for arg, name in zip(node.args, names, strict=False)
        )
        kwargs = {
            name: self._argument(arg, name, node, skeleton) for name, arg in node.kwargs.items()
        }
        mode, region = node.meta.get(MODE), node.meta.get(REGION, PLAIN)
        self.key.append(
            (
                node.op,
                target,
                None if mode == self.part.mode else mode,
                None if region == self.part.region else region,
                tuple(skeleton),
            )
        )
        return OpenedOp(node, target, args, kwargs)

    def _module(self, path: str, node: fx.Node) -> str:
        """The module that an op calls, by its path from here; it is filled once."""
        relative = self._relative(path)
        loop: Loop | None = node.meta.get(LOOP)
        if loop is None:
            self._fill(relative, self.facts.made[path])
            return relative
        names = [f"{relative}.{number}" for number in loop.numbers]
        if loop.uniform and not set(names) & self.made.keys():
            one = self._fill(names[0], loop.made[0])
            self.made.update(dict.fromkeys(names, one))
            last = relative.rpartition(".")[2]
            count = self.fill(Slot(loop.count, relative, f"num_{last}", False))
            filled = replace(loop, made=(one,) * len(names), count=count)
        else:
            made = tuple(map(self._fill, names, loop.made))
            self.key.append(len(names))
            filled = replace(loop, made=made)
        self.loops[node] = filled
        self.key.append((relative, loop.carried, loop.collected, loop.numbers[0]))
        return relative

    def _fill(self, name: str, made: Made) -> Made:
        if name not in self.made:
            self.key.append((name, made.key()))
            self.made[name] = made.mapped(
                lambda value, argument: self.fill(Slot(value, name, argument, False))
            )
        return self.made[name]

    def _relative(self, path: str) -> str:
        if not path.startswith(self.prefix):
            raise OutsideError
        return path.removeprefix(self.prefix)

    def _argument(self, value: Any, name: str, node: fx.Node, skeleton: list[str]) -> Any:
        def leaf(one: Any) -> Any:
            self.place += 1
            if isinstance(one, fx.Node):
                return self._value(one, name, node, skeleton)
            if is_number(one):
                skeleton.append(type(one).__name__)
                return self.fill(Slot(one, "", name, True, node, self.place - 1))
            skeleton.append(f"{type(one).__name__} {one!r}")
            return one

        if isinstance(value, list) and value and self._is_a_variable(value, node):
            skeleton.append("values")
            return self.fill(Slot(tuple(value), "", name, True, node))
        opened = fx.node.map_aggregate(value, leaf)
        skeleton.append(str(fx.node.map_aggregate(value, lambda _: 0)))
        return opened

    def _is_a_variable(self, values: Sequence[Any], node: fx.Node) -> bool:
        """Whether the part is given a whole list, however long: the line does not write one."""
        source = node.meta.get("source")
        return (source is None or "[" not in source.text) and all(
            isinstance(value, fx.Node)
            and value not in self.places
            and value.name not in self.facts.literals
            and not (value.op == "get_attr" and str(value.target).startswith(self.prefix))
            for value in values
        )

    def _value(self, used: fx.Node, name: str, node: fx.Node, skeleton: list[str]) -> Any:
        if used in self.places:
            skeleton.append(f"op {self.places[used]}")
            return used
        if used.name in self.facts.literals:
            return self._text(self.facts.literals[used.name], name, node, skeleton)
        target = str(used.target)
        if used.op == "get_attr" and target.startswith(self.prefix):
            return self._state(target, used, skeleton)
        skeleton.append("value")
        return self.fill(Slot(used, "", name, True, node))

    def _text(self, text: str, name: str, node: fx.Node, skeleton: list[str]) -> Written:
        """A size's text, the numbers in which are slots."""
        found = self.part.sizes.text(text)
        if found is None:
            raise OutsideError
        text = found
        self.texts.append(text)
        parts = re.split(r"(?<![\w.])(\d+(?:\.\d+)?(?:e-?\d+)?)(?![\w.])", text)
        # A size that a later op fixes is a number before it and, to ops after it, no size.
        skeleton.append("int" if text.isdecimal() else "#".join(parts[::2]))
        for place in range(1, len(parts), 2):
            number = float(parts[place]) if "." in parts[place] else int(parts[place])
            filled = self.fill(Slot(number, "", name, True, node, self.place - 1))
            parts[place] = repr(filled) if filled is not number else parts[place]
        return Written("".join(parts))

    def _state(self, name: str, used: fx.Node, skeleton: list[str]) -> fx.Node:
        tensor = self.facts.state[name]
        relative = self._relative(name)
        skeleton.append(relative)
        self.tensors[relative] = None
        owner = name.rpartition(".")[0]
        stock = made_whole(self.facts.tree.get(owner), self.read[owner])
        if stock is not None and owner != self.part.path:
            self._fill(self._relative(owner), stock)
        elif relative not in self.shapes:
            trained = isinstance(tensor, nn.Parameter)
            saved = name in self.facts.saved
            facts = (relative, trained, saved, tensor.requires_grad, tensor.dtype, tensor.dim())
            self.key.append(facts)
            module, _, last = relative.rpartition(".")
            self.shapes[relative] = tuple(
                self.fill(Slot(size, module, f"{last}_size_{k}", False))
                for k, size in enumerate(tensor.shape)
            )
        return used


def _told(part: Part, facts: Facts) -> Iterator[TensorSpec]:
    """The shapes of the values from outside that are there whenever the part runs."""
    inside = set(part.nodes)
    for node in part.nodes:
        for value in (*node.args, *node.kwargs.values()):
            if not isinstance(value, fx.Node) or value in inside or value.op == "get_attr":
                continue
            if value.meta.get(MODE) in (None, part.mode) and value.name in facts.specs:
                yield facts.specs[value.name]


def _argument_names(node: fx.Node) -> list[str]:
    """What the positional arguments of an op are called, as far as the function tells.

    A name that no call may give says nothing: `a` and `b` of operator.mul.
    """
    if node.target is operator.getitem:
        return ["", "index"]
    unknown = [""] * len(node.args)
    if node.op == "call_function":
        try:
            parameters = inspect.signature(node.target).parameters.values()  # type: ignore[arg-type]
        except (ValueError, TypeError):
            return unknown
        return [*("" if p.kind is p.POSITIONAL_ONLY else p.name for p in parameters), *unknown]
    return unknown
