"""What is known of each value before it is computed: shapes and sizes, as text in named sizes."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxpipe.runtime.manifest import UNKNOWN, TensorSpec

SIZES = ("batch", "length", "depth", "height", "width", "rows")  # and `length_2`, for a second one
_HARD = re.compile(rf"{UNKNOWN}|%|\*\*|[a-z]\(|==|<|>")  # what a person would not compute anew
_NAME = re.compile(rf"\b(?:{'|'.join(SIZES)})(?:_\d+)?\b")


def sizes_in(text: str) -> tuple[str, ...]:
    """The names of sizes in an expression, each once."""
    return tuple(dict.fromkeys(_NAME.findall(text)))


def where_told(spec: TensorSpec, name: str) -> tuple[int, int] | None:
    """A dimension of `spec` that tells the size `name`, and by how much it is multiplied there."""
    if name in spec.shape:
        return spec.shape.index(name), 1
    for place, dim in enumerate(spec.shape):
        factor, _, rest = str(dim).partition(" * ")
        if rest == name and factor.isdecimal():
            return place, int(factor)
    return None


def tensor_spec(value: Tensor, write: Callable[[Any], str | None] = str) -> TensorSpec:
    """Shape, dtype and gradient of a real or fake tensor; `write` gives the text of a symbol."""
    shape = tuple(_size(dim, write) for dim in value.shape)
    return TensorSpec(shape, str(value.dtype).removeprefix("torch."), value.requires_grad)


def _size(dim: int | torch.SymInt, write: Callable[[Any], str | None]) -> int | str:
    if isinstance(dim, int):
        return dim
    expression = dim.node.expr
    return int(expression) if expression.is_Integer else write(expression) or UNKNOWN


def literal(value: Any, write: Callable[[Any], str | None]) -> str | None:
    """A value that is no tensor as Python text in terms of sizes; None if it can't be written."""
    if isinstance(value, torch.SymInt):
        text = str(_size(value, write))
        return None if _HARD.search(text) else text
    if isinstance(value, torch.Size | tuple | list):
        items = [literal(item, write) for item in value]
        if any(item is None for item in items):
            return None
        inner = ", ".join(str(item) for item in items)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(items) == 1)})"
    if isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    return None
