"""Sizes that the model leaves open: tracing puts symbols in their place, which get names here."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from fxpipe.capture.whole import whole
from fxpipe.errors import CaptureError
from fxpipe.ops.interpret import reads_dtype
from fxpipe.ops.specs import literal, tensor_spec
from fxpipe.runtime.sizes import holds, is_arithmetic, size

Names = dict[sympy.Expr, str]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one trace says of the inputs' sizes: their shapes, and where else it holds.

    `compared` are all comparisons that came out true, `conditions` those that others must meet.
    """

    shapes: tuple[tuple[int | str, ...], ...]
    values: Mapping[str, int]
    conditions: tuple[str, ...]
    compared: tuple[str, ...]


def describe_sizes(graph: fx.Graph, tensors: Sequence[Tensor], batched: Sequence[bool]) -> Sizes:
    """Name the symbols of a trace and say in them what each node of `graph` is.

    `meta["spec"]` is the spec of a tensor, `meta["size"]` the text of a size. Raises CaptureError
    if an input's size is known only by way of another, or the graph holds for one batch only.
    """
    given = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    names = _names(given, batched)
    if "batch" not in names.values():
        raise CaptureError(
            f"forward works for one batch size only, {tensors[list(batched).index(True)].size(0)}\n"
            "A pipeline cuts the batch into micro-batches: write x.size(0) in place of the number."
        )

    def write(expression: sympy.Expr) -> str | None:
        return _text(expression, names)

    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            node.meta["spec"] = tensor_spec(value, write)
        elif not reads_dtype(node) and (text := literal(value, write)) is not None:
            node.meta["size"] = text
    shapes = tuple(tensor_spec(value, write).shape for value in given)
    values = {
        dim: tensor.size(k)
        for tensor, shape in zip(tensors, shapes, strict=True)
        for k, dim in enumerate(shape)
        if isinstance(dim, str) and dim.isidentifier()
    }
    if not set(names.values()) <= values.keys():
        raise CaptureError("an input's size is known only by way of another")
    compared = dict(_comparisons(given, names))
    return Sizes(
        shapes, values, tuple(text for text in compared if compared[text]), tuple(compared)
    )


def together(traces: Sequence[Sizes]) -> Sizes:
    """What several traces of one model say. A size that one of them fixes needs no condition."""
    fixed = {name for sizes in traces for name in sizes.values} - {*traces[0].values}
    conditions = dict.fromkeys(text for sizes in traces for text in sizes.conditions)
    kept = (text for text in conditions if fixed.isdisjoint(re.findall(r"\w+", text)))
    return replace(traces[0], conditions=tuple(kept))


def elsewhere(sizes: Sizes, rows: int) -> dict[str, int]:
    """Other values than the traced ones for all sizes, near them and like them in what they meet.

    `rows` is the batch's. Raises CaptureError if none are found near.
    """
    found = dict(sizes.values) | {"batch": rows}
    for name, traced in sizes.values.items():
        if name == "batch":
            continue
        near = sorted({*range(2, 2 * traced + 1)} - {traced}, key=lambda n: abs(n - traced))
        named = [c for c in sizes.compared if re.search(rf"\b{name}\b", c)]
        fit = (n for n in near if all(holds(c, found | {name: n}) for c in named))
        other = next(fit, None)
        if other is None:
            raise CaptureError(f"the model takes no other {name} near {traced}")
        found[name] = other
    return found


def resized(tensors: Sequence[Tensor], sizes: Sizes, values: Mapping[str, int]) -> list[Tensor]:
    """The inputs with other sizes: cut, or continued from their beginning."""
    made = []
    for tensor, shape in zip(tensors, sizes.shapes, strict=True):
        changed = tensor.detach()
        for k, dim in enumerate(shape):
            if isinstance(dim, str):
                place = torch.arange(size(dim, values), device=tensor.device) % tensor.size(k)
                changed = changed.index_select(k, place)
        made.append(changed.clone().requires_grad_(tensor.requires_grad))
    return made


def _names(given: Sequence[Tensor], batched: Sequence[bool]) -> Names:
    """A name for each symbol, by the first input that has it."""
    names: Names = {}
    for value, is_batched in zip(given, batched, strict=True):
        dims = [_symbol(dim) for dim in value.shape]
        if is_batched and dims[0] is not None:
            names.setdefault(dims[0], "batch")
        new = [dim for dim in dict.fromkeys(dims) if dim is not None and dim not in names]
        words = ["depth", "height", "width"][-len(new) :]
        if value.dim() < 4 or len(new) not in (2, 3):
            words = ["length"] * len(new)
        for symbol, word in zip(new, words, strict=True):
            taken = sum(name.partition("_")[0] == word for name in names.values())
            names[symbol] = f"{word}_{taken + 1}" if taken else word
    return names


def _symbol(dim: Any) -> sympy.Expr | None:
    return dim.node.expr if not isinstance(dim, int) and dim.node.expr.is_Symbol else None


def _text(expression: sympy.Expr, names: Names) -> str | None:
    """An expression as arithmetic; None if it is none, or has symbols of no size of an input."""
    if not expression.free_symbols <= names.keys():
        return None
    renamed = expression.xreplace(
        {
            symbol: type(symbol)(names[symbol], integer=True, positive=True)
            for symbol in expression.free_symbols
        }
    )
    text = PythonPrinter().doprint(whole(renamed))
    text = ast.unparse(_Ordered().visit(ast.parse(text, mode="eval")))
    return text if text == "True" or is_arithmetic(text, names.values()) else None


class _Ordered(ast.NodeTransformer):
    """Numbers stand behind what they are added to, `(height - 1) // 2 + 1`, and minus is minus."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """`a + b` in the order of a person."""
        self.generic_visit(node)
        match node:
            case ast.BinOp(ast.Constant(), ast.Add(), right) if not isinstance(right, ast.Constant):
                return ast.BinOp(right, ast.Add(), node.left)
            case ast.BinOp(ast.UnaryOp(ast.USub(), ast.Constant() as number), ast.Add(), right):
                return ast.BinOp(right, ast.Sub(), number)
            case ast.BinOp(ast.UnaryOp(ast.USub(), ast.Constant(1)), ast.Mult(), right):
                return ast.UnaryOp(ast.USub(), right)
            case ast.BinOp(left, ast.Add(), ast.UnaryOp(ast.USub(), right)):
                return ast.BinOp(left, ast.Sub(), right)
            case ast.BinOp(
                left,
                ast.Add(),
                ast.BinOp(ast.UnaryOp(ast.USub(), ast.Constant() as number), ast.Mult(), right),
            ):
                return ast.BinOp(left, ast.Sub(), ast.BinOp(number, ast.Mult(), right))
        return node


def _comparisons(given: Sequence[Tensor], names: Names) -> Iterator[tuple[str, bool]]:
    """Comparisons of sizes that came out true in the trace, as Python, and if it depends on them.

    Of those that torch's own rules for shapes made, some tell whether a size is 1 and some, of the
    batch too, which kernel is chosen: the ops decide that anew. Of the batch alone, only those
    count that forward makes, if arithmetic tells them.
    """
    dims: list[Any] = [dim for value in given for dim in value.shape]
    environment: ShapeEnv = next(dim.node.shape_env for dim in dims if not isinstance(dim, int))
    (batch,) = [symbol for symbol, name in names.items() if name == "batch"]
    for guard in environment.guards:
        fact = environment.replace(guard.expr)
        place = str(guard.sloc.framework_loc)
        by_path = any(part in place for part in ("_dynamo", "torch/nn"))
        of_batch = fact.free_symbols <= {batch}
        if not fact.free_symbols <= names.keys() or (of_batch and not by_path):
            continue
        text = _text(fact, names)
        if text is None and of_batch:
            continue
        if text is None:
            raise CaptureError(f"forward compares sizes that no arithmetic tells: {fact}")
        if text != "True":
            yield text, by_path or not (fact.has(sympy.Ne) or batch in fact.free_symbols)
