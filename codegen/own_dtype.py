"""The model's own dtype in a class of the package, which reads it off one of its parameters."""

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx, nn

from fxpipe.codegen.constructor import Constructor
from fxpipe.codegen.loops import LOOP, Loop
from fxpipe.codegen.made import Written
from fxpipe.codegen.names import path
from fxpipe.codegen.scope import Scope

DTYPE = re.compile(r"(?<![\w.])dtype\b(?!=)")  # the variable, not an argument or an attribute


def own_dtypes(
    scope: Scope,
    names: Mapping[str, str],
    every: Sequence[fx.Node],
    made: Constructor,
    dtype: torch.dtype,
) -> Iterator[str]:
    """What tells the model's own dtype, best first.

    Who casts to it does so, mostly, for the parameter that is used next. In a model without
    parameters it is that of what is given.
    """
    asking = (place for place, node in enumerate(scope.nodes) if _asks_dtype(scope, node))
    first = next(asking, 0)
    for node in (*scope.nodes[first:], *reversed(scope.nodes[:first]), *every):
        for name in _parameters(scope, node, dtype):
            yield f"{path(name, made.containers)}.dtype"
    for value in scope.inputs:
        spec = scope.specs.get(value)
        known = spec is not None and spec.torch_dtype == dtype and value not in scope.fixed
        if known and value not in scope.modes:
            yield f"{names[value]}.dtype"
    yield "torch.get_default_dtype()"


def _asks_dtype(scope: Scope, node: fx.Node) -> bool:
    found: list[object] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    texts = (scope.literals.get(a.name, "") if isinstance(a, fx.Node) else a for a in found)
    return any(isinstance(text, str | Written) and DTYPE.search(str(text)) for text in texts)


def _parameters(scope: Scope, node: fx.Node, dtype: torch.dtype) -> Iterator[str]:
    """Those of this dtype that an op uses, by name."""
    for used in node.all_input_nodes:
        tensor = scope.state.get(str(used.target)) if used.op == "get_attr" else None
        if isinstance(tensor, nn.Parameter) and tensor.dtype == dtype:
            yield str(used.target)
    if node.op == "call_module":
        loop: Loop | None = node.meta.get(LOOP)
        called = str(node.target) if loop is None else f"{node.target}.{loop.numbers[0]}"
        for name, own in scope.made[called].dtypes.items():
            if own == dtype:
                yield f"{called}.{name}"
