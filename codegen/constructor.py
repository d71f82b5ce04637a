"""The constructor of a class: its modules, parameters and buffers under the original names."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from fxpipe.codegen.initial import filled, initial_values
from fxpipe.codegen.loops import LOOP, Loop
from fxpipe.codegen.made import Made, Written, is_number, made_whole
from fxpipe.codegen.names import Containers, assignment, child, is_attribute, path
from fxpipe.codegen.scope import Scope
from fxpipe.ir import Capture

_FEWEST = 3  # modules, made alike, that are worth a comprehension beside others


@dataclass(slots=True)
class _Place:
    """A node of the module tree: a module that is made, or one that holds what is used of it."""

    made: Made | None = None
    loop: Loop | None = None
    children: dict[str, "_Place"] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=list)

    @property
    def is_numbered(self) -> bool:
        """Whether it holds numbered modules only, as `nn.Sequential` and `nn.ModuleList` do."""
        numbered = bool(self.children) and all(name.isdecimal() for name in self.children)
        return numbered and self.made is None and not self.tensors

    @property
    def is_made_at_once(self) -> bool:
        """Whether it is numbered modules each of which is one expression."""
        whole = (
            c.made is not None and not c.children and not c.tensors for c in self.children.values()
        )
        return self.is_numbered and all(whole)


@dataclass(frozen=True, slots=True)
class Constructor:
    """The lines of `__init__`; `containers` says how the modules at a path are reached."""

    lines: tuple[str, ...]
    containers: Containers


def construct(scope: Scope) -> Constructor:
    """Declare all that the ops of `scope` use of the model, in the order in which they use it.

    What is numbered is in the order of its numbers, in which a loop goes over it.
    """
    root = _Place()
    for node in scope.all_nodes:
        for used in node.all_input_nodes:
            if used.op == "get_attr" and str(used.target) in scope.state:
                owner, _, last = str(used.target).rpartition(".")
                place = _find(root, owner)
                if place.made is None and last not in place.tensors:
                    place.tensors.append(last)
        if node.op == "call_module":
            _use(root, node, scope)
    _make_whole(root, "", scope)
    _put_in_order(root)
    writer = _Declaring(scope)
    writer.walk(root, "", "self")
    return Constructor(tuple(writer.lines), writer.containers)


def held_state(capture: Capture, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The names of all parameters and buffers that ops use, in the order in which they use them."""
    held: dict[str, None] = {}
    for node in nodes:
        for used in node.all_input_nodes:
            if used.op == "get_attr" and str(used.target) in capture.state:
                held[str(used.target)] = None
        if node.op == "call_module":
            module = capture.modules[str(node.target)]
            own = [*dict(module.named_parameters()), *dict(module.named_buffers())]
            held.update((f"{node.target}.{name}", None) for name in own)
    return tuple(held)


def tie_lines(capture: Capture, held: Iterable[str], containers: Containers) -> Iterator[str]:
    """Parameters that the model ties, tied where one stage holds both names."""
    first: dict[str, str] = {}
    for name in held:
        owner = first.setdefault(capture.first_name(name), name)
        if owner != name:
            yield f"{path(name, containers)} = {path(owner, containers)}  # tied"


def _make_whole(place: _Place, name: str, scope: Scope) -> None:
    """Stock modules whose tensors are read by ops of others are made as what they are."""
    if place.tensors and not place.children:
        place.made = scope.made.get(name) or made_whole(scope.tree.get(name), place.tensors)
        place.tensors = [] if place.made is not None else place.tensors
    for last, below in place.children.items():
        _make_whole(below, f"{name}.{last}" if name else last, scope)


def _put_in_order(place: _Place) -> None:
    if place.is_numbered:
        place.children = dict(sorted(place.children.items(), key=lambda child: int(child[0])))
    for below in place.children.values():
        _put_in_order(below)


def _use(root: _Place, node: fx.Node, scope: Scope) -> None:
    target = str(node.target)
    loop: Loop | None = node.meta.get(LOOP)
    if loop is None:
        _find(root, target).made = scope.made[target]
        return
    container = _find(root, target)
    for number in loop.numbers:
        container.children.setdefault(str(number), _Place()).made = scope.made[f"{target}.{number}"]
    container.loop = loop


def _find(root: _Place, name: str) -> _Place:
    place = root
    for part in name.split(".") if name else ():
        if place.made is not None:
            return place  # what a class declares by itself
        place = place.children.setdefault(part, _Place())
    return place


class _Declaring:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.lines: list[str] = []
        self.containers: dict[str, str] = {}

    def walk(self, place: _Place, name: str, expression: str) -> None:
        """Declare what `place`, which the expression is, holds."""
        kind = self.containers.get(name, "")
        for last in place.tensors:
            self.lines.append(self._tensor(expression, last, f"{name}.{last}" if name else last))
        runs = _alike_runs(place) if kind == "dict" else {}
        written: set[str] = set()
        for last, below in place.children.items():
            full = f"{name}.{last}" if name else last
            self._chain(full, below.made)
            if last in runs:
                numbers, told = runs[last]
                self.lines.append(f"{expression}.update({{str(i): {told}}})")
                written.update(numbers)
            if last in written:
                assert below.made is not None
                self.lines += below.made.freezes(child(expression, last, kind))
                continue
            if below.is_made_at_once:
                value = self._container(full, below)
            elif below.made is not None:
                value = str(below.made)
            elif self._is_parameters_alone(full, below):
                value = self._parameters(full, below)
            else:
                value = "nn.ModuleDict()" if below.is_numbered else "nn.Module()"
                if below.is_numbered:
                    self.containers[full] = "dict"
            self.lines.append(assignment(expression, last, value, kind))
            target = child(expression, last, kind)
            if below.made is not None:
                self.lines += below.made.freezes(target)
            elif below.is_made_at_once:
                for number, one in below.children.items():
                    assert one.made is not None
                    self._chain(f"{full}.{number}", one.made)
                    self.lines += one.made.freezes(child(target, number, self.containers[full]))
            else:
                self.walk(below, full, target)

    def _chain(self, name: str, made: Made | None) -> None:
        """How the modules of an nn.Sequential are reached."""
        if made is None or not made.chain:
            return
        if [number for number, _ in made.chain] == [str(k) for k in range(len(made.chain))]:
            self.containers[name] = "list"
        for last, below in made.chain:
            self._chain(f"{name}.{last}", below)

    def _container(self, name: str, place: _Place) -> str:
        """All modules of a list in one expression."""
        made = {int(number): one.made for number, one in place.children.items() if one.made}
        numbers = list(made)
        in_list = numbers == list(range(len(numbers)))
        self.containers[name] = "list" if in_list else "dict"
        count = place.loop.count if place.loop is not None else len(made)
        if isinstance(count, int) and count != len(made):
            count = len(made)
        in_row = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        first = None if in_list else numbers[0]
        told = _comprehension(list(made.values()), count, first) if in_row else None
        if in_list:
            items = told or [f"[{', '.join(map(str, made.values()))}]"]
            return f"nn.ModuleList({' '.join(items)})"
        if told is None:
            pairs = ", ".join(f'"{number}": {one}' for number, one in made.items())
            return f"nn.ModuleDict({{{pairs}}})"
        return f"nn.ModuleDict({{str(i): {' '.join(told)}}})"

    def _is_parameters_alone(self, name: str, place: _Place) -> bool:
        """Whether it holds what no attribute can be called, as nn.ParameterList does."""
        held = [self.scope.state[f"{name}.{last}"] for last in place.tensors]
        keys = not any(hasattr(nn.ParameterDict, last) for last in place.tensors)
        alone = keys and not place.children and all(isinstance(t, nn.Parameter) for t in held)
        return alone and not all(map(is_attribute, place.tensors))

    def _parameters(self, name: str, place: _Place) -> str:
        """All of them in one expression."""
        numbered = all(map(str.isdecimal, place.tensors))
        names = sorted(place.tensors, key=int) if numbered else place.tensors
        made = {last: self._parameter(f"{name}.{last}") for last in names}
        place.tensors = []
        in_list = list(made) == [str(k) for k in range(len(made))]
        self.containers[name] = "list" if in_list else "dict"
        if not in_list:
            pairs = ", ".join(f'"{last}": {one}' for last, one in made.items())
            return f"nn.ParameterDict({{{pairs}}})"
        if len(made) > 1 and len({*made.values()}) == 1:
            return f"nn.ParameterList({made['0']} for _ in range({len(made)}))"
        return f"nn.ParameterList([{', '.join(made.values())}])"

    def _tensor(self, owner: str, last: str, name: str) -> str:
        tensor = self.scope.state[name]
        if isinstance(tensor, nn.Parameter):
            return assignment(owner, last, self._parameter(name))
        persistent = "" if name in self.scope.saved else ", persistent=False"
        zeros = filled("zeros", tensor, self._sizes(name))
        return f"{owner}.register_buffer({last!r}, {zeros}{persistent})"

    def _parameter(self, name: str) -> str:
        tensor = self.scope.state[name]
        frozen = "" if tensor.requires_grad else ", requires_grad=False"
        return f"nn.Parameter({initial_values(tensor, self._sizes(name))}{frozen})"

    def _sizes(self, name: str) -> Sequence[int | str]:
        shape = self.scope.shapes.get(name)
        return tuple(self.scope.state[name].shape) if shape is None else shape


def _alike_runs(place: _Place) -> dict[str, tuple[list[str], str]]:
    """Runs of modules that one expression makes, by the first's number: all numbers, and it."""
    runs: list[list[str]] = []
    for number, one in place.children.items():
        alone = one.made is None or one.children or one.tensors
        if alone or not runs or not runs[-1] or int(number) != int(runs[-1][-1]) + 1:
            runs.append([])
        runs[-1] += [] if alone else [number]
    found = {}
    for run in (run for run in runs if len(run) >= _FEWEST):
        made = [m for number in run if (m := place.children[number].made) is not None]
        if told := _comprehension(made, len(made), int(run[0])):
            found[run[0]] = (run, " ".join(told))
    return found


def _comprehension(made: Sequence[Made], count: Any, start: int | None) -> list[str] | None:
    """What makes one of the modules, and the loop over it, if they are alike enough.

    `start` is the first one's number if the loop must number them.
    """
    if len(made) < 2 and isinstance(count, int):
        return None
    if len({str(one) for one in made}) == 1:
        if start is None:
            return [str(made[0]), f"for _ in range({count!r})"]
        span = f"{start}, {start + len(made)}" if start else f"{len(made)}"
        return [str(made[0]), f"for i in range({span})"]
    if len({one.key() for one in made}) > 1 or any(one.chain for one in made):
        return None
    shown = made[0].needing(made)
    varying = [
        name
        for name in shown.needed
        if is_number(shown.arguments[name]) and len({one.arguments[name] for one in made}) > 1
    ]
    if len(varying) != 1:
        return None
    (name,) = varying
    template = shown.mapped(lambda value, argument: Written(name) if argument == name else value)
    values = ", ".join(repr(one.arguments[name]) for one in made)
    if start is not None:
        first = f", {start}" if start else ""
        return [str(template), f"for i, {name} in enumerate(({values}){first})"]
    return [str(template), f"for {name} in ({values})"]
