"""Which of Dynamo's graphs one pipeline serves: those that do the same, whatever their batch.

In a graph of one row the batch is a number, even where a graph of more rows has a symbol.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from sympy import Expr
from torch import Tensor, fx

from fxpipe.capture.inputs import batch_of

# Graphs that are equal at these numbers of rows are equal at all.
_ROWS = (7907, 7919)


class _At(NamedTuple):
    """A value, by its place in the graph: its name may be another one time."""

    place: int


@dataclass(frozen=True, slots=True)
class Served:
    """A graph: all that it does, with sizes as expressions of the batch's symbol, if it has one.

    `state` are the tensors of the module's own that it reads; `specs` are of its inputs.
    """

    ops: tuple[tuple[Any, ...], ...]
    symbol: Expr | None
    rows: int
    state: tuple[int, ...]
    specs: tuple[object, ...]

    @classmethod
    def of(cls, traced: fx.GraphModule, inputs: Mapping[int, Tensor]) -> "Served":
        """That of `traced`; `inputs` are by their place among its placeholders."""
        rows, batched = batch_of(list(inputs.values()))
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        first = placeholders[list(inputs)[batched.index(True)]].meta["example_value"]
        size = first.shape[0]
        state = [
            id(example)
            for k, node in enumerate(placeholders)
            if k not in inputs and isinstance(example := node.meta["grapharg"].example, Tensor)
        ]
        return cls(
            ops=_ops(traced),
            symbol=None if isinstance(size, int) else size.node.expr,
            rows=rows,
            state=tuple(state),
            specs=tuple((tuple(t.shape[1:]), t.dtype) for t in inputs.values()),
        )

    def serves(self, other: "Served") -> bool:
        """Whether what runs this graph gives what the other one would."""
        if (self.state, self.specs) != (other.state, other.specs):
            return False
        tried = _ROWS if other.symbol is not None else (other.rows,)
        return all(self._at(rows) == other._at(rows) for rows in tried)

    def _at(self, rows: int) -> str:
        """What it does with a batch of so many rows."""

        def number(value: Any) -> Any:
            if not isinstance(value, Expr):
                return value
            return value if self.symbol is None else value.subs({self.symbol: rows})

        return str([fx.node.map_aggregate(op, number) for op in self.ops])


def _ops(traced: fx.GraphModule) -> tuple[tuple[Any, ...], ...]:
    """Each op and what it is given; sizes are no ops, but parts of what is."""
    places: dict[fx.Node, Any] = {}
    found: list[tuple[Any, ...]] = []
    place = count()
    for node in traced.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            places[node] = value.node.expr
            continue
        places[node] = _At(next(place))
        if node.op != "placeholder":
            what = _held(traced, node) if node.op == "get_attr" else node.target
            given = fx.map_arg((node.args, dict(node.kwargs)), places.__getitem__)
            found.append((node.op, what, given))
    return tuple(found)


def _held(traced: fx.GraphModule, node: fx.Node) -> object:
    """What a graph has itself: a constant, or the graph of a function that it calls."""
    value = attrgetter(str(node.target))(traced)
    if isinstance(value, fx.GraphModule):
        return _ops(value)
    return (value.dtype, value.tolist()) if isinstance(value, Tensor) else id(value)
