"""The body of a stage's forward: its ops as lines, in groups under the user's own lines.

What the user wrote as one expression is one expression again; a module that a group names more
than once gets a variable.
"""

import ast
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import fx

from fxpipe.codegen.lines import Writer, is_statement
from fxpipe.codegen.names import path, plain
from fxpipe.interpret import MODE
from fxpipe.ir import Capture
from fxpipe.regions import PLAIN, REGION, Region

_WIDTH = 80  # columns that ruff leaves to a line in a method


@dataclass(frozen=True, slots=True)
class Line:
    """Code, a comment, or both."""

    code: str = ""
    comment: str = ""

    def __str__(self) -> str:
        comment = f"# {self.comment}" if self.comment else ""
        indent = " " * (len(self.code) - len(self.code.lstrip()))
        if len(self.code) + len(comment) + 2 > _WIDTH and self.code.strip() and comment:
            return f"{indent}{comment}\n{self.code}"
        return f"{self.code}  {comment}" if self.code.strip() and comment else self.code + comment


@dataclass(slots=True)
class Body:
    """Writes the ops of one stage; `names` are the variables of its values."""

    capture: Capture
    nodes: Sequence[fx.Node]
    names: Mapping[str, str]
    outputs: Sequence[str]
    dicts: frozenset[str]
    _indent: str = ""
    _region: Region = PLAIN
    _mode: bool | None = None
    _folded: dict[fx.Node, str] = field(default_factory=dict)
    _short: dict[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[Line]:
        """All lines but the final return."""
        uses = Counter(value.name for node in self.nodes for value in reads(node))
        uses.update(self.outputs)
        above = ""
        for (region, mode, module, heading), group in groupby(self.nodes, key=self._heading):
            members = list(group)
            said, above = above == heading, heading
            if not said or region != self._region or (self._mode is None and mode is not None):
                yield Line()
            if not said:
                yield Line("", heading)
            yield from self._enter(region)
            yield from self._branch(mode)
            yield from self._shorten(module, members)
            writer = Writer(self._value, self._path)
            unpacked: set[fx.Node] = set()
            for place, node in enumerate(members):
                after = members[place + 1] if place + 1 < len(members) else None
                items = _items(node, members[place + 1 :])
                if node in unpacked:
                    continue
                if items:
                    unpacked.update(item for item in items if item is not None)
                    yield self._unpack(node, items, writer)
                elif after is not None and self._folds(node, after, uses, writer):
                    self._folded[node] = writer.expression(node)
                else:
                    yield from self._write(node, writer, wanted=uses[node.name] > 0)

    def _heading(self, node: fx.Node) -> tuple[Region, bool | None, str, str]:
        """The region and mode that the line is of, the module whose forward has it, the line."""
        region, mode = node.meta.get(REGION, PLAIN), node.meta.get(MODE)
        op = self.capture.ops[node.name]
        module = op.module.rpartition(".")[0] if node.op == "call_module" else op.module
        if op.source is None:
            return region, mode, module, plain(module)
        where = f"{op.source.file}:{op.source.line}"
        return (
            region,
            mode,
            module,
            plain(" | ".join(part for part in (module, where, op.source.text) if part)),
        )

    def _enter(self, region: Region) -> Iterator[Line]:
        """What runs under another grad mode or autocast stands below a `with`."""
        if region == self._region:
            return
        yield from self._branch(None)
        self._region = region
        self._indent = "" if region == PLAIN else "    "
        if region != PLAIN:
            yield Line(f"with {', '.join(_settings(region))}:")

    def _branch(self, mode: bool | None) -> Iterator[Line]:
        """What only one mode runs stands below an `if`."""
        if mode is self._mode:
            return
        if self._mode is not None:
            self._indent = self._indent[4:]
        if mode is not None:
            other = "else:" if self._mode is not None else None
            condition = "self.training" if mode else "not self.training"
            yield Line(self._indent + (other or f"if {condition}:"))
            self._indent += "    "
        self._short = {}  # what one branch binds is unknown to the other, and behind both
        self._mode = mode

    def _shorten(self, module: str, members: Sequence[fx.Node]) -> Iterator[Line]:
        """A variable for the module, if the group names it more than once and it is a long name."""
        inside = f"{module}."
        named = sum(name.startswith(inside) for node in members for name in _paths(node))
        if named < 2 or "." not in module:
            return
        parts = module.split(".")
        start = max((k for k, part in enumerate(parts) if not part.isdecimal()), default=0)
        variable = "_".join(parts[start:])
        if not variable.isidentifier() or variable in self.names.values():
            variable = f"{variable}_module"
        if not variable.isidentifier() or self._short.get(module) == variable:
            return
        self._short = {k: v for k, v in self._short.items() if v != variable}
        yield Line(f"{self._indent}{variable} = {path(module, self.dicts)}")
        self._short[module] = variable

    def _path(self, name: str) -> str:
        parent = name.rpartition(".")[0]
        if parent in self._short:
            return path(name, self.dicts, known=(parent, self._short[parent]))
        return path(name, self.dicts)

    def _value(self, node: fx.Node) -> str:
        if node in self._folded:
            return self._folded.pop(node)
        if node.name in self.names:
            return self.names[node.name]
        if node.name in self.capture.literals:
            return self.capture.literals[node.name]
        return self._path(str(node.target))

    def _folds(
        self, node: fx.Node, after: fx.Node, uses: Mapping[str, int], writer: Writer
    ) -> bool:
        """Whether `after` can hold `node` as an argument: nothing comes between, nobody else reads.

        So ops are run in the order of the graph, and random numbers drawn in it.
        """
        alone = uses[node.name] == 1 and list(reads(after)).count(node) == 1
        if not alone or is_statement(node) or is_statement(after):
            return False
        folded = dict(self._folded)
        self._folded[node] = writer.expression(node)
        width = len(self._indent) + len(writer.statement(after, self.names[after.name], True))
        self._folded = folded
        return width <= _WIDTH

    def _write(self, node: fx.Node, writer: Writer, wanted: bool) -> Iterator[Line]:
        statement = writer.statement(node, self.names[node.name], wanted)
        *before, last = _unparenthesized(statement).splitlines()
        yield from (Line(self._indent + line) for line in before)
        spec = self.capture.specs.get(node.name)
        yield Line(self._indent + last, "" if spec is None else str(spec))

    def _unpack(self, node: fx.Node, items: Sequence[fx.Node | None], writer: Writer) -> Line:
        variables = ", ".join(self.names[item.name] if item else "_" for item in items)
        specs = {str(self.capture.specs[item.name]) for item in items if item}
        comment = specs.pop() if len(specs) == 1 else ""
        code = _unparenthesized(f"{variables} = {writer.expression(node)}")
        return Line(self._indent + code, comment)


def _settings(region: Region) -> Iterator[str]:
    """The contexts of a `with` that opens `region`."""
    if not region.grad:
        yield "torch.no_grad()"
    for each in region.autocasts:
        cache = "" if each.cache is None else f", cache_enabled={each.cache}"
        yield f"torch.autocast(device.type, dtype={each.dtype}, enabled={each.enabled}{cache})"


def _items(node: fx.Node, following: Sequence[fx.Node]) -> list[fx.Node | None]:
    """The ops right behind `node` that unpack the tuple it makes, if nothing else reads it."""
    value = node.meta.get("val")
    if not isinstance(value, tuple | list) or len(value) < 2:
        return []
    items: list[fx.Node | None] = [None] * len(value)
    for item in following[: len(node.users)]:
        if item.target is not operator.getitem or item.args[0] is not node:
            return []
        if not isinstance(item.args[1], int) or items[item.args[1]] is not None:
            return []
        items[item.args[1]] = item
    return items if len(following) >= len(node.users) > 0 else []


def _unparenthesized(code: str) -> str:
    """The same code with no more parentheses than it needs."""
    return ast.unparse(ast.parse(code))


def names_device(node: fx.Node) -> bool:
    """Whether the line of `node` names the stage's device."""
    found: list[object] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    opens_autocast = bool(node.meta.get(REGION, PLAIN).autocasts)
    return opens_autocast or any(isinstance(value, torch.device) for value in found)


def reads(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments of `node` that are values, each as often as it stands there."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return iter(found)


def _paths(node: fx.Node) -> list[str]:
    """The module paths and state names that `node` uses."""
    names = [str(used.target) for used in reads(node) if used.op == "get_attr"]
    return [*names, str(node.target)] if node.op == "call_module" else names
