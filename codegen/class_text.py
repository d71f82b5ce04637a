"""A class of the package, line by line: what its template lays out."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import fx

from fxpipe.codegen.body import Body
from fxpipe.codegen.comments import Comments, Line
from fxpipe.codegen.constructor import Constructor, construct
from fxpipe.codegen.loops import LOOP, collected_names, item_of, read_throughout
from fxpipe.codegen.names import local_names
from fxpipe.codegen.own_dtype import DTYPE, own_dtypes
from fxpipe.codegen.reading import names_device
from fxpipe.codegen.scope import Scope
from fxpipe.codegen.sizes import size_lines
from fxpipe.runtime.manifest import Mode

_CONDITION: dict[Mode | None, str] = {
    None: "",
    "train": " if self.training else None",
    "eval": " if not self.training else None",
}


@dataclass(frozen=True, slots=True)
class MethodText:
    """The template's fields of one method; `names` are the variables of its values.

    `code` is all of it but for the comments.
    """

    name: str
    doc: str
    signature: str
    result: str
    body: tuple[str, ...]
    code: str
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ClassText:
    """The template's fields of one class; `methods` are its forward and what that calls."""

    name: str
    doc: tuple[str, ...]
    settings: str
    constructor: tuple[str, ...]
    methods: tuple[MethodText, ...]
    containers: Mapping[str, str]

    @property
    def names(self) -> Mapping[str, str]:
        """The variables of forward."""
        return self.methods[0].names

    @property
    def code(self) -> str:
        """All code, for a look at what it needs to import."""
        return "\n".join([self.settings, *self.constructor, *(m.code for m in self.methods)])


def class_text(
    scope: Scope,
    name: str,
    doc: Sequence[str],
    *,
    dtype: torch.dtype,
    comments: Comments,
    ties: Iterable[str] = (),
    docs: Mapping[str, str] | None = None,
) -> ClassText:
    """Decide every line of the class of `scope`; `dtype` is the model's own.

    `docs` say of its methods what they are.
    """
    made = construct(scope)
    methods = [_method(scope, "forward", "", scope.all_nodes, made, dtype, comments)]
    for method, own in scope.methods.items():
        told = (docs or {})[method]
        plain = Comments("", "")
        methods.append(_method(own, method, told, scope.all_nodes, made, dtype, plain))
    code = "\n".join(method.code for method in methods)
    used = {setting for setting in scope.settings if re.search(rf"\bself\.{setting}\b", code)}
    kept = tuple(f"self.{setting} = {setting}" for setting in scope.settings if setting in used)
    typed = [f"{setting}: {_type(value)}" for setting, value in scope.settings.items()]
    return ClassText(
        name=name,
        doc=tuple(doc),
        settings=", ".join(["self", *typed]),
        constructor=(*kept, *made.lines, *ties),
        methods=tuple(methods),
        containers=made.containers,
    )


def _method(
    scope: Scope,
    name: str,
    doc: str,
    every: Sequence[fx.Node],
    made: Constructor,
    dtype: torch.dtype,
    comments: Comments,
) -> MethodText:
    """Decide every line of a method with the ops of `scope`, of `every` op of the class."""
    listed = {node.name for node in scope.nodes if node.target is item_of}
    names = local_names(
        scope.nodes,
        scope.inputs,
        scope.outputs,
        scope.called,
        read_throughout(scope.nodes),
        {value: name for value, name in scope.crossing.items() if value not in listed},
    )
    names |= collected_names(scope.nodes, names)
    parameters = [f"{names[value]}: {_kind(scope, value)}" for value in scope.inputs]
    lines = [*Body(scope, every, names, made.containers, comments).lines()]
    body = _opened(scope, names, next(own_dtypes(scope, names, every, made, dtype)), lines)
    results = [f"{names[value]}{_CONDITION[scope.modes.get(value)]}" for value in scope.outputs]
    body = _returning(body, ", ".join(_starred(results, _lengths(scope, names))) or "()")
    text = [part for line in body for part in str(line).split("\n")]
    while text and not text[0]:  # between groups stands a blank line, before the first none
        text = text[1:]
    signature, result = ", ".join(["self", *parameters]), _result(scope)
    return MethodText(
        name=name,
        doc=doc,
        signature=signature,
        result=result,
        body=tuple(text),
        code="\n".join([signature, result, *(line.code for line in body)]),
        names=names,
    )


def _opened(
    scope: Scope, names: Mapping[str, str], dtype: str, lines: Sequence[Line]
) -> list[Line]:
    """The lines behind those that tell sizes, the model's dtype and the device, if they are read.

    What is read once, the dtype, stands in its place if there is room.
    """
    always = [v for v in scope.inputs if v not in scope.modes]
    given = [(names[v], scope.specs[v]) for v in always if v in scope.specs]
    opening = [*map(Line, size_lines(scope.texts, given))]
    if any(DTYPE.search(text) for text in scope.texts):
        written = [replace(line, code=DTYPE.sub(dtype, line.code)) for line in lines]
        changed = [new for new, line in zip(written, lines, strict=True) if new != line]
        if sum(len(DTYPE.findall(line.code)) for line in lines) == 1 and changed[0].fits:
            lines = written
        else:
            opening.append(Line(f"dtype = {dtype}"))
    if any(names_device(node) for node in scope.nodes):
        device = f"{names[always[0]]}.device" if always else 'torch.device("cpu")'
        opening.append(Line(f"device = {device}"))
    return [*opening, *lines]


def _type(value: object) -> str:
    return "tuple[int, ...]" if isinstance(value, tuple) else type(value).__name__


def _returning(body: Sequence[Line], result: str) -> list[Line]:
    """The body with its return; what the last line makes is returned at once."""
    last = body[-1] if body else Line()
    if last.code.startswith(f"{result} = ") and "\n" not in last.code:
        returned = replace(last, code=last.code.replace(f"{result} =", "return", 1))
        return [*body[:-1], *returned.fitted()]
    return [*body, Line(f"return {result}")]


def _lengths(scope: Scope, names: Mapping[str, str]) -> dict[str, int]:
    """How long the lists are that loops collect."""
    loops = [(node, node.meta[LOOP]) for node in scope.nodes if LOOP in node.meta]
    return {
        names[f"{node.name}.{result}"]: len(loop.numbers)
        for node, loop in loops
        for result in loop.collected
    }


def _starred(results: Sequence[str], lengths: Mapping[str, int]) -> Iterator[str]:
    """Results, those that are a list from its beginning as one: `*all_keys`, `*all_x[:3]`."""
    for name, run in groupby(results, key=lambda text: text.partition("[")[0]):
        items = list(run)
        if len(items) < 2 or items != [f"{name}[{k}]" for k in range(len(items))]:
            yield from items
        else:
            yield f"*{name}" if len(items) == lengths[name] else f"*{name}[:{len(items)}]"


def _result(scope: Scope) -> str:
    kinds = [_kind(scope, value) for value in scope.outputs]
    if len(kinds) > 4 and len(set(kinds)) == 1:
        kinds = [kinds[0], "..."]
    return kinds[0] if len(scope.outputs) == 1 else f"tuple[{', '.join(kinds) or '()'}]"


def _kind(scope: Scope, value: str) -> str:
    """The type of a value that goes in or out."""
    if value in scope.lists:
        return "list[Tensor]"
    found = next((node.meta.get("val") for node in scope.nodes if node.name == value), None)
    kind = "tuple[Tensor, ...]" if isinstance(found, tuple | list) else "Tensor"
    return kind + " | None" * (value in scope.modes)
