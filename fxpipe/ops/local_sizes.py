"""Sizes as a stage or a class knows them: read off what it is given, under names of its own.

Behind a strided convolution a height is `(height - 1) // 2 + 1` of the model's input. Who is given
such a tensor reads that size off it and calls it `height`.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

from fxpipe.ops.specs import sizes_in, where_told
from fxpipe.runtime.manifest import UNKNOWN, TensorSpec


@dataclass(frozen=True, slots=True)
class LocalSizes:
    """What dimensions that somebody is given are called there, by what they are in the model."""

    names: Mapping[str, str]

    def missing(self, text: str) -> tuple[str, ...]:
        """The sizes in `text` that nothing given tells."""
        return sizes_in(self._rewritten(text).replace("$", "_")) if sizes_in(text) else ()

    def text(self, text: str) -> str | None:
        """An expression in the model's sizes as one in the local names; None if one is missing."""
        if text in self.names or not sizes_in(text):
            return self.names.get(text, text)
        found = self._rewritten(text)
        return None if sizes_in(found.replace("$", "_")) else found.replace("$", "")

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """The same in local names; `_` stands where one is missing."""
        shape = tuple(
            dim if isinstance(dim, int) or dim == UNKNOWN else self.text(dim) or "_"
            for dim in spec.shape
        )
        return TensorSpec(shape, spec.dtype, spec.requires_grad)

    def _rewritten(self, text: str) -> str:
        """The text with `$name` for what has a local name."""
        return ast.unparse(_Rewriting(self.names).visit(ast.parse(text, mode="eval")))


def local_sizes(given: Iterable[TensorSpec]) -> LocalSizes:
    """Names for the dimensions of what is given, in the order in which they are met.

    A size that stands alone in a dimension, or times a number, is read off that; an expression gets
    a name of its own unless it is a product of such.
    """
    specs = list(given)
    dims = list(dict.fromkeys(d for spec in specs for d in spec.shape if isinstance(d, str)))
    alone = dict.fromkeys(size for dim in dims for size in sizes_in(dim) if _tells(specs, size))
    found = dict.fromkeys(alone, "known")
    for dim in dims:
        is_product = not set(dim) & set("+-/") and LocalSizes(found).text(dim) is not None
        if UNKNOWN not in dim and not is_product:
            found[dim] = "known"

    def met(key: str) -> int:
        tells = [key] if key in dims else [dim for dim in dims if key in sizes_in(dim)]
        return dims.index(tells[0])

    names: dict[str, str] = {}
    for key in sorted(found, key=met):
        names[key] = _name(key, names)
    return LocalSizes(names)


def _tells(specs: Iterable[TensorSpec], size: str) -> bool:
    return any(where_told(spec, size) is not None for spec in specs)


def _name(dim: str, found: Mapping[str, str]) -> str:
    """`height` for any function of the height alone, `rows` for one of the batch and others."""
    words = {size.partition("_")[0] for size in sizes_in(dim)}
    name = words.pop() if len(words) == 1 else "rows" if "batch" in words else "length"
    taken = sum(other.partition("_")[0] == name for other in found.values())
    return f"{name}_{taken + 1}" if taken else name


class _Rewriting(ast.NodeTransformer):
    """Puts `$name` for each known expression; of a product, for known factors of it.

    A quotient is found again behind further strides: with `height` for `(h - 1) // 2 + 1`,
    `(h - 1) // 4` is `(height - 1) // 2`.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        parsed = [(ast.parse(text, mode="eval").body, name) for text, name in names.items()]
        self.quotients = [
            (quotient, name) for tree, name in parsed if (quotient := _quotient(tree))
        ]
        self.products = [
            (Counter(map(ast.unparse, _factors(tree))), name)
            for tree, name in parsed
            if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Mult)
        ]

    def visit(self, node: ast.AST) -> ast.AST:
        """`node` rewritten."""
        if isinstance(node, ast.expr) and (name := self.names.get(ast.unparse(node))) is not None:
            return ast.Name(f"${name}")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return self._product([*_factors(node)])
        quotient = _quotient(node)
        node = self.generic_visit(node)
        if quotient and sizes_in(ast.unparse(node).replace("$", "_")):
            return self._behind_strides(*quotient[:2]) or node
        return node

    def _behind_strides(self, numerator: str, divisor: int) -> ast.expr | None:
        """A quotient by a known one of the same numerator, if that can be divided further."""
        for (same, stride, offset), name in self.quotients:
            if same == numerator and divisor % stride == 0:
                known: ast.expr = ast.Name(f"${name}")
                if offset:
                    known = ast.BinOp(known, ast.Sub(), ast.Constant(offset))
                if stride == divisor:
                    return known
                return ast.BinOp(known, ast.FloorDiv(), ast.Constant(divisor // stride))
        return None

    def _product(self, factors: list[ast.expr]) -> ast.expr:
        for wanted, name in self.products:
            have = Counter(map(ast.unparse, factors))
            if wanted <= have:
                left = have - wanted
                kept = []
                for factor in factors:
                    text = ast.unparse(factor)
                    if left[text]:
                        left[text] -= 1
                        kept.append(factor)
                factors = [*kept, ast.Name(f"${name}")]
        made = [self.visit(f) if not _is_local(f) else f for f in factors]
        return reduce(lambda a, b: ast.BinOp(a, ast.Mult(), b), made)  # type: ignore[arg-type,return-value]


def _quotient(node: ast.AST) -> tuple[str, int, int] | None:
    """Numerator, divisor and offset of `numerator // divisor + offset`."""
    match node:
        case ast.BinOp(ast.BinOp(_, ast.FloorDiv()) as inner, ast.Add(), ast.Constant(int(offset))):
            pass
        case ast.BinOp(_, ast.FloorDiv()) as inner:
            offset = 0
        case _:
            return None
    match inner.right:
        case ast.Constant(int(divisor)):
            return ast.unparse(inner.left), divisor, offset
    return None


def _is_local(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id.startswith("$")


def _factors(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from _factors(node.left)
        yield from _factors(node.right)
    else:
        yield node
