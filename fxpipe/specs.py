"""What is known of each value before it is computed: shapes and sizes as expressions in `batch`."""

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils._sympy.printers import PythonPrinter

from fxpipe.runtime.manifest import TensorSpec

SIZES = ("batch", "length", "depth", "height", "width")  # and `length_2`, where there are two
_NAME = re.compile(rf"\b(?:{'|'.join(SIZES)})(?:_\d+)?\b")


def sizes_in(text: str) -> tuple[str, ...]:
    """The names of sizes in an expression, each once."""
    return tuple(dict.fromkeys(_NAME.findall(text)))


def where_told(spec: TensorSpec, name: str) -> tuple[int, int] | None:
    """A dimension of `spec` that tells the size `name`, and by how much it is multiplied there."""
    if name in spec.shape:
        return spec.shape.index(name), 1
    for place, dim in enumerate(spec.shape):
        factor, _, rest = str(dim).partition("*")
        if rest == name and factor.isdecimal():
            return place, int(factor)
    return None


def tensor_spec(value: Tensor) -> TensorSpec:
    """Shape, dtype and gradient of a real or fake tensor."""
    shape = tuple(dim if isinstance(dim, int) else size_expression(dim) for dim in value.shape)
    return TensorSpec(shape, str(value.dtype).removeprefix("torch."), value.requires_grad)


def size_expression(size: torch.SymInt) -> int | str:
    """A symbolic size as text, its one symbol called `batch`."""
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)
    (symbol,) = expression.free_symbols
    renamed = expression.subs(symbol, type(symbol)("batch", integer=True, positive=True))
    return str(PythonPrinter().doprint(renamed))


def literal(value: Any) -> str | None:
    """A value that is no tensor as Python text in terms of `batch`; None if it can't be written."""
    if isinstance(value, torch.SymInt):
        return str(size_expression(value))
    if isinstance(value, torch.Size | tuple | list):
        items = [literal(item) for item in value]
        if any(item is None for item in items):
            return None
        inner = ", ".join(str(item) for item in items)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(items) == 1)})"
    if isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    return None
