"""What the user's line calls the arguments of an op: `C` in `x.view(B, H, W, C)`."""

import ast
import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

_SIGNS: dict[Any, type[ast.operator]] = {
    operator.add: ast.Add,
    operator.sub: ast.Sub,
    operator.mul: ast.Mult,
    operator.truediv: ast.Div,
    operator.pow: ast.Pow,
    operator.iadd: ast.Add,
    operator.isub: ast.Sub,
    operator.imul: ast.Mult,
    operator.itruediv: ast.Div,
    operator.ipow: ast.Pow,
}
_BRACKETS = ("", ")", "))", ")))", ",)", "])")


def argument_words(node: fx.Node) -> list[str]:
    """For each argument of an op, those in tuples one by one, a variable's name or ''."""
    source = node.meta.get("source")
    called = str(getattr(node.target, "__name__", node.target)).rpartition(".")[2]
    if source is None:
        return []
    for end in _BRACKETS:
        try:
            tree = ast.parse(source.text.rstrip(":") + end)
        except SyntaxError:
            continue
        if node.target in _SIGNS:
            return _operands(tree, _SIGNS[node.target])
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and _name(call.func) == called:
                return [word for argument in call.args for word in _words(argument)]
        return []
    return []


def assigned_word(text: str) -> str | None:
    """The first variable that a statement assigns: `x` in `x, _ = self.attn(`."""
    for end in _BRACKETS:
        try:
            statement = ast.parse(text + end).body[0]
        except (SyntaxError, IndexError):
            continue
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found = targets[0].elts[0] if isinstance(targets[0], ast.Tuple) else targets[0]
            return found.id if isinstance(found, ast.Name) else None
        return None
    return None


def _operands(tree: ast.AST, sign: type[ast.operator]) -> list[str]:
    """The names on both sides of a sign, if it stands in the line once."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(left, op, right) | ast.AugAssign(left, op, right) if type(op) is sign:
                found.append([left, right])
    if len(found) != 1:
        return []
    return ["" if isinstance(side, ast.BinOp) else _name(side) for side in found[0]]


def _words(argument: ast.expr) -> Iterator[str]:
    if isinstance(argument, ast.Tuple | ast.List):
        for item in argument.elts:
            yield from _words(item)
    else:
        yield _name(argument)


def _name(expression: ast.expr) -> str:
    match expression:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case ast.UnaryOp(operand=inner) | ast.Subscript(value=inner):
            return _name(inner)
        case ast.BinOp(left=left, right=right):
            return _name(right) or _name(left)
    return ""
