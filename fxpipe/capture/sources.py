"""The user's statements that led to an op: where they stand, and which variables they assign."""

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from torch import fx

from fxpipe.capture.places import parse_stack, user_frames
from fxpipe.ir import SourceLine
from fxpipe.ops.source import short_path

# Expressions that put values together, of which none is what the variable holds.
_SEVERAL = (ast.Tuple, ast.List, ast.Dict, ast.ListComp, ast.DictComp)


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of the user's, in the function `function`; `source` is where it begins.

    `returns` says that it is a `return`; `assigns` is the one variable that it assigns to; `lists`
    are the variables that it appends to; `variables` are all names that its file assigns anywhere.
    """

    source: SourceLine
    function: str
    returns: bool = False
    assigns: str | None = None
    lists: tuple[str, ...] = ()
    variables: frozenset[str] = frozenset()


@lru_cache(maxsize=64)  # ops of one line stand together
def statements(stack: str) -> tuple[Statement, ...]:
    """The statements of a stack trace that torch keeps as text, outermost first."""
    found = []
    for frame in user_frames(parse_stack(stack)):
        line, text = frame.lineno or 0, (frame.line or "").strip()
        file = _file(frame.filename)
        here = [statement for statement in file.at.get(line, ()) if _simple(statement)]
        if file.at.get(line):
            line = file.at[line][0].lineno
            text = linecache.getline(frame.filename, line).strip()
        found.append(
            Statement(
                source=SourceLine(short_path(frame.filename), line, text),
                function=frame.name,
                returns=len(here) == 1 and isinstance(here[0], ast.Return),
                assigns=_assigned_to(here[0]) if len(here) == 1 else None,
                lists=tuple(name for statement in here for name in _appended_to(statement)),
                variables=file.variables,
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _File:
    """By line, the statements that stand on it, each from its first line on."""

    at: dict[int, list[ast.stmt]]
    variables: frozenset[str]


@lru_cache(maxsize=32)
def _file(name: str) -> _File:
    try:
        tree = ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError):
        return _File({}, frozenset())
    at: dict[int, list[ast.stmt]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno
            for line in range(node.lineno, (end or node.lineno) + 1):
                at.setdefault(line, []).append(node)
    return _File(at, frozenset(_assigned(tree)))


def _assigned(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def _simple(statement: ast.stmt) -> bool:
    return not hasattr(statement, "body")


def _assigned_to(statement: ast.stmt) -> str | None:
    match statement:
        case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value):
            return None if isinstance(value, _SEVERAL) else name
    return None


def _appended_to(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append"))):
            yield name
        case ast.Expr(ast.Call(ast.Attribute(ast.Attribute(attr=name), "append"))):
            yield name


def statements_of(node: fx.Node) -> tuple[Statement, ...]:
    """The statements that led to an op of Dynamo's, outermost first."""
    return statements(node.meta.get("stack_trace") or "")


def source_of(node: fx.Node) -> SourceLine | None:
    """The innermost of them, as far as it is known."""
    found = statements_of(node)
    return found[-1].source if found else None


def where(node: fx.Node) -> str:
    """That line in words; the op's name if it isn't known."""
    return str(source_of(node) or node.name)
