"""A function or class in the user's file: its text, and what the names in it stand for."""

import ast
import builtins
import inspect
import symtable
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from fxpipe.errors import CaptureError
from fxpipe.ops.source import short_path

_UNUSED = ("symbolic",)  # methods that only an export to ONNX calls

Importable = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Use:
    """A place in a text where the user calls `value`, of its surroundings, `called`."""

    node: ast.expr
    called: str
    value: Any


@dataclass(frozen=True, slots=True)
class Definition:
    """The text of the function or class `name`, what it uses, and its file and line."""

    name: str
    text: str
    uses: tuple[Use, ...]
    place: str


def definition(value: Any, importable: Importable) -> Definition:
    """Read `value`, a function or class, from the file that defines it.

    An annotation becomes `object` if it names what is not `importable`. Raises CaptureError if the
    text can't be had.
    """
    value = inspect.unwrap(getattr(value, "_torchdynamo_inline", value))  # torch.jit.script
    if not isinstance(value, FunctionType | type):
        raise CaptureError(f"it is a {type(value).__name__}, neither code nor a plain constant")
    functions = _functions(value)
    scope = _scope(value, functions)
    try:
        lines, first = inspect.getsourcelines(value)
        text = _without_unused(_outdented(lines), value.__name__)
        text = edited(text, _vague_annotations(_parsed(text, value.__name__), scope, importable))
        uses = tuple(_uses(_parsed(text, value.__name__), text, scope, importable))
    except (OSError, TypeError, ValueError, SyntaxError) as error:
        raise CaptureError(f"its source can't be read ({error})") from error
    last = first + len(lines)
    if not all(first <= function.__code__.co_firstlineno < last for function in functions):
        raise CaptureError("its source can't be told from other lines of its file")
    file = short_path(inspect.getsourcefile(value) or "")
    return Definition(value.__name__, text, uses, f"{file}:{first}")


def edited(text: str, edits: Iterable[tuple[ast.expr, str]]) -> str:
    """The text with other words in the places of some nodes."""
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, words in sorted(edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset))[::-1]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        data = data[:start] + words.encode() + data[end:]
    return data.decode()


def _functions(value: FunctionType | type) -> list[FunctionType]:
    """The function itself, or the functions that a class defines."""
    if isinstance(value, FunctionType):
        return [value]
    members = [inspect.unwrap(getattr(m, "__func__", m)) for m in vars(value).values()]
    return [m for m in members if isinstance(m, FunctionType) and m.__module__ == value.__module__]


def _scope(value: FunctionType | type, functions: Iterable[FunctionType]) -> Mapping[str, Any]:
    """What names stand for around `value`: its module's, over them those of enclosing functions."""
    scope = dict(vars(sys.modules[value.__module__])) if value.__module__ in sys.modules else {}
    for function in functions:
        scope.update(function.__globals__)
    for function in functions:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        scope.update((name, cell.cell_contents) for name, cell in cells)
    return scope


def _outdented(lines: list[str]) -> str:
    """The lines without the indentation of the first; what hangs further left is in a string."""
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "".join(line[indent:] if not line[:indent].strip() else line for line in lines)


def _parsed(text: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    tree = ast.parse(text).body[0]
    if not isinstance(tree, ast.FunctionDef | ast.ClassDef) or tree.name != name:
        raise ValueError(f"no def or class of the name {name}")
    return tree


def _without_unused(text: str, name: str) -> str:
    lines = text.splitlines(keepends=True)
    for node in reversed(_parsed(text, name).body):
        if isinstance(node, ast.FunctionDef) and node.name in _UNUSED:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            del lines[first - 1 : node.end_lineno]
    return "".join(lines)


def _vague_annotations(
    tree: ast.AST, scope: Mapping[str, Any], importable: Importable
) -> Iterator[tuple[ast.expr, str]]:
    """Annotations that name the user's own types, or what is not there: as `object`."""
    for node in ast.walk(tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if not isinstance(annotation, ast.expr):
                continue
            inner = list(ast.walk(annotation))
            names = {part.id for part in inner if isinstance(part, ast.Name)}
            known = all(
                importable(scope[name]) if name in scope else hasattr(builtins, name)
                for name in names
            )
            quoted = any(isinstance(getattr(part, "value", None), str) for part in inner)
            if not known or quoted:
                yield annotation, "object"


def _uses(
    tree: ast.AST, text: str, scope: Mapping[str, Any], importable: Importable
) -> Iterator[Use]:
    """Each name that is looked up outside of the text; `module.name` of a user's module as one."""
    names = set(_outer_names(symtable.symtable(text, "<source>", "exec"))) & scope.keys()
    whole = set()
    for node in ast.walk(tree):  # a node before those inside it
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = scope[node.value.id] if node.value.id in names else None
            if isinstance(module, ModuleType) and not importable(module):
                whole.add(node.value)
                yield Use(node, node.attr, getattr(module, node.attr, None))
        elif isinstance(node, ast.Name) and node.id in names and node not in whole:
            yield Use(node, node.id, scope[node.id])


def _outer_names(table: symtable.SymbolTable) -> Iterator[str]:
    outermost = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_declared_global() and symbol.is_assigned():
            raise CaptureError(f"it writes the global `{symbol.get_name()}`")
        if symbol.is_global() or (outermost and symbol.is_referenced()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _outer_names(child)
