"""The body of a forward: ops as lines, in groups under the user's own lines.

What the user wrote as one expression is one expression again; a module that a group names more
than once gets a variable; a run over a list of modules is a loop.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, groupby

from torch import fx, nn

from fxpipe.codegen.calls import home
from fxpipe.codegen.comments import WIDTH, Comments, Line
from fxpipe.codegen.contexts import contexts
from fxpipe.codegen.lines import Writer, called, is_statement
from fxpipe.codegen.loops import CHECKPOINT, LOOP, Loop, item_of
from fxpipe.codegen.names import Containers, is_free, path
from fxpipe.codegen.outlived import outlived
from fxpipe.codegen.reading import items_of, paths, reads
from fxpipe.codegen.scope import Scope
from fxpipe.ops.interpret import MODE, reads_dtype
from fxpipe.ops.regions import PLAIN, REGION, Region


@dataclass(slots=True)
class Body:
    """Writes the ops of one method; `names` are the variables of its values.

    `every` op of the class is known.
    """

    scope: Scope
    every: Sequence[fx.Node]
    names: Mapping[str, str]
    containers: Containers
    comments: Comments
    _indent: str = ""
    _region: Region = PLAIN
    _mode: bool | None = None
    _folded: dict[fx.Node, str] = field(default_factory=dict)
    _assigned: set[fx.Node] = field(default_factory=set)
    _outlived: Mapping[fx.Node, Sequence[fx.Node]] = field(init=False)
    _done: list[str] = field(default_factory=list)
    _short: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._outlived = outlived(self.scope, self.names)

    def lines(self) -> Iterator[Line]:
        """All lines but the final return."""
        uses = Counter(value.name for node in self.scope.nodes for value in reads(node))
        uses.update(self.scope.outputs)
        for (region, mode, module), section in groupby(self.scope.nodes, key=_section):
            members = list(section)
            yield from self._enter(region)
            yield from self._branch(mode)
            short = [*self._shorten(module, members)]
            for source, group in groupby(members, key=lambda node: node.meta.get("source")):
                written = [*self._members(list(group), uses)]
                code = any(line.code.strip() for line in written)
                place = self._written_in(module)
                yield from self.comments.around(place, source, written, short if code else [])
                short = [] if code else short

    def _written_in(self, module: str) -> str:
        """The module whose class has the lines of `module`: a list of modules has none."""
        while module and isinstance(self.scope.tree.get(module), nn.Sequential | nn.ModuleList):
            module = module.rpartition(".")[0]
        return module

    def _members(self, members: Sequence[fx.Node], uses: Mapping[str, int]) -> Iterator[Line]:
        writer = Writer(self._value, self._path)
        for node in filter(reads_dtype, members):  # a part of the line of what takes it
            self._folded[node] = writer.expression(node)
        members = [node for node in members if not reads_dtype(node)]
        unpacked: set[fx.Node] = set()
        for place, node in enumerate(members):
            after = members[place + 1] if place + 1 < len(members) else None
            items = items_of(node, members[place + 1 :])
            if node in unpacked or node.target is item_of:
                continue
            unpacked.update(item for item in items if item is not None)
            if LOOP in node.meta:
                yield from self._loop(node, items)
            elif items:
                yield self._unpack(node, items, writer)
            elif after is not None and self._folds(node, after, uses, writer):
                self._folded[node] = writer.expression(node)
                self._outlive(node)
                continue
            else:
                yield from self._write(node, writer, wanted=uses[node.name] > 0)
            made = [node, *(item for item in items if item is not None)]
            bound = [value for value in made if uses[value.name] > 0]
            self._assigned.update(bound)
            anew = {self.names[value.name] for value in bound}
            self._done = [name for name in self._done if name not in anew]
            self._outlive(*made)
            if node is not self.scope.nodes[-1]:
                yield from self._delete()

    def _enter(self, region: Region) -> Iterator[Line]:
        """What runs under other settings stands below a `with`."""
        if region == self._region:
            return
        yield from self._branch(None)
        self._region = region
        self._indent = "" if region == PLAIN else "    "
        if region != PLAIN:
            yield Line(f"with {', '.join(contexts(region))}:")

    def _branch(self, mode: bool | None) -> Iterator[Line]:
        """What only one mode runs stands below an `if`, that of train mode first."""
        if mode is self._mode:
            return
        if self._mode is not None:
            self._indent = self._indent[4:]
        if mode is not None:
            condition = "self.training" if mode else "not self.training"
            yield Line(self._indent + ("else:" if self._mode else f"if {condition}:"))
            self._indent += "    "
        self._short = {}  # what one branch binds is unknown to the other, and behind both
        self._mode = mode

    def _shorten(self, module: str, members: Sequence[fx.Node]) -> Iterator[Line]:
        """A variable for the module, if its lines name it more than once and it is a long name."""
        inside = f"{module}."
        named = sum(name.startswith(inside) for node in members for name in paths(node))
        if named < 2 or "." not in module:
            return
        last = next((part for part in reversed(module.split(".")) if not part.isdecimal()), "")
        variable = self._free(_singular(last) if module[-1].isdecimal() else last)
        if not variable.isidentifier() or self._short.get(module) == variable:
            return
        self._short = {k: v for k, v in self._short.items() if v != variable}
        yield Line(f"{self._indent}{variable} = {path(module, self.containers)}")
        self._short[module] = variable

    def _path(self, name: str) -> str:
        parts = name.split(".")
        for k in range(len(parts) - 1, 0, -1):
            if (above := ".".join(parts[:k])) in self._short:
                return path(name, self.containers, known=(above, self._short[above]))
        return path(name, self.containers)

    def _value(self, node: fx.Node) -> str:
        if node in self._folded:
            return self._folded.pop(node)
        if node.name in self.names:
            return self.names[node.name]
        if node.name in self.scope.literals:
            return self.scope.literals[node.name]
        return self._path(str(node.target))

    def _folds(
        self, node: fx.Node, after: fx.Node, uses: Mapping[str, int], writer: Writer
    ) -> bool:
        """Whether `after` can hold `node` as an argument: nothing comes between, nobody else reads.

        So ops are run in the order of the graph, and random numbers drawn in it.
        """
        alone = uses[node.name] == 1 and list(reads(after)).count(node) == 1
        apart = LOOP in after.meta or CHECKPOINT in node.meta
        if not alone or is_statement(node) or is_statement(after) or apart:
            return False
        folded = dict(self._folded)
        self._folded[node] = writer.expression(node)
        width = len(self._indent) + len(writer.statement(after, self.names[after.name], True))
        self._folded = folded
        return width <= WIDTH

    def _write(self, node: fx.Node, writer: Writer, wanted: bool) -> Iterator[Line]:
        statement = writer.statement(node, self.names[node.name], wanted)
        *before, last = _unparenthesized(statement).splitlines()
        yield from (Line(self._indent + line) for line in before)
        spec = self.scope.specs.get(node.name)
        yield Line(self._indent + last, spec="" if spec is None else str(spec))

    def _outlive(self, *nodes: fx.Node) -> None:
        """Note the variables that nothing needs behind `nodes`."""
        values = (value for node in nodes for value in self._outlived.get(node, ()))
        self._done += [self.names[value.name] for value in values if value in self._assigned]

    def _delete(self) -> Iterator[Line]:
        if self._done:
            yield Line(f"{self._indent}del {', '.join(self._done)}")
            self._done = []

    def _unpack(self, node: fx.Node, items: Sequence[fx.Node | None], writer: Writer) -> Line:
        variables = [self.names[item.name] if item else "_" for item in items]
        code = _unparenthesized(_bound(variables, writer.expression(node)))
        return Line(self._indent + code, spec=self._common_spec(items))

    def _common_spec(self, items: Sequence[fx.Node | None]) -> str:
        specs = {str(self.scope.specs.get(item.name, "")) for item in items if item}
        return specs.pop() if len(specs) == 1 else ""

    def _loop(self, node: fx.Node, items: Sequence[fx.Node | None]) -> Iterator[Line]:
        """A run over a list of modules: what goes from one to the next has one variable."""
        loop: Loop = node.meta[LOOP]
        results = items or [node]
        variables = [self.names[item.name] if item else "_" for item in results]
        arguments = []
        begun: dict[str, str] = {}
        for given, result in zip(node.args, loop.carried, strict=True):
            text = Writer(self._value, self._path).argument(given)
            if result is not None and variables[result] != text:
                begun[variables[result]] = text
            arguments.append(text if result is None else variables[result])
        if begun:
            yield Line(f"{self._indent}{', '.join(begun)} = {', '.join(begun.values())}")
        container = self._path(str(node.target))
        kind = self.containers[str(node.target)]
        variable = self._loop_variable(str(node.target), loop)
        self._short = {k: v for k, v in self._short.items() if v != variable}
        lists = {result: self.names[f"{node.name}.{result}"] for result in loop.collected}
        for result, name in lists.items():
            if variables[result] == "_":
                variables[result] = f"each_{name.removeprefix('all_')}"
            yield Line(f"{self._indent}{name} = []")
        module = variable
        if self._covers(node, loop):
            over = f"{container}.values()" if kind == "dict" else container
            yield Line(f"{self._indent}for {variable} in {over}:")
        elif kind == "list":
            over = f"{container}[{loop.numbers[0]}:{loop.numbers[-1] + 1}]"
            yield Line(f"{self._indent}for {variable} in {over}:")
        else:
            first = f"{loop.numbers[0]}, " * (loop.numbers[0] != 0)
            span = f"{first}{loop.numbers[-1] + 1}"
            counter = self._counter()
            yield Line(f"{self._indent}for {counter} in range({span}):")
            module = f"{container}[str({counter})]"
        call = _bound(variables, called(node, module, ", ".join(arguments)))
        yield Line(f"{self._indent}    {call}", spec=self._common_spec(results))
        for result, name in lists.items():
            yield Line(f"{self._indent}    {name}.append({variables[result]})")

    def _covers(self, node: fx.Node, loop: Loop) -> bool:
        """Whether the list holds no other modules than those of the loop."""
        inside = f"{node.target}."
        here = {f"{inside}{number}" for number in loop.numbers}
        others = (other for other in self.every if other is not node)
        return all(
            ".".join(name.split(".")[: inside.count(".") + 1]) in here
            for other in others
            for name in paths(other)
            if name.startswith(inside) or name == node.target
        )

    def _loop_variable(self, container: str, loop: Loop) -> str:
        """`layer` for `layers`, or the last word of the class's name: `block` for a GPT2Block."""
        last = container.rpartition(".")[2]
        words = re.findall(r"[A-Z]+[a-z]*|[a-z]+", loop.made[0].name)
        name = _singular(last)
        return self._free(name if name != last else words[-1].lower())

    def _counter(self) -> str:
        """A variable for the number of a round, that no value and no module has."""
        taken = {*self.names.values(), *self._short.values()}
        return next(name for name in chain("ijk", _numbered("i")) if name not in taken)

    def _free(self, name: str) -> str:
        """A variable for a module that no value has."""
        taken = set(self.names.values())
        if is_free(name) and name not in taken:
            return name
        own = f"{name}_module".lstrip("_")
        return next(each for each in chain((own,), _numbered(own)) if each not in taken)


def _section(node: fx.Node) -> tuple[Region, bool | None, str]:
    """The region and mode that the line is of, and the module whose forward has it."""
    return node.meta.get(REGION, PLAIN), node.meta.get(MODE), home(node)


def _bound(variables: Sequence[str], call: str) -> str:
    """The results of `call` to these variables; one alone by its place: `_` would hold the rest."""
    wanted = [variable for variable in variables if variable != "_"]
    if len(wanted) == 1 < len(variables):
        return f"{wanted[0]} = {call}[{variables.index(wanted[0])}]"
    return f"{', '.join(variables)} = {call}"


def _numbered(name: str) -> Iterator[str]:
    return (f"{name}_{number}" for number in count(2))


def _singular(name: str) -> str:
    return name[:-1] if name.endswith("s") and len(name) > 3 else name


def _unparenthesized(code: str) -> str:
    """The same code with no more parentheses than it needs."""
    return ast.unparse(ast.parse(code))
