"""The model's own dtype, which tracing bakes into a graph, made an input of it again.

`x.to(torch.float32)`, where it was `x.to(y.dtype)`, becomes `x.to(dtype)`. Which dtypes the user
wrote as such can't be seen in one graph: the model is traced once more in another precision.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.capture.dynamo import FlatModel
from fxpipe.capture.edit import Flags, Trace, kind_of, leaves_of, ops_of
from fxpipe.errors import FxpipeError
from fxpipe.interpret import DTYPE, limit, model_dtype

_LIMITS = ("min", "max", "eps", "tiny")


def open_dtypes(graph: fx.Graph, model: FlatModel, tensors: Sequence[Tensor], trace: Trace) -> None:
    """Rewrite `graph` in place so that it reads the model's dtype where it means it.

    `trace` gives the graph of a copy of the model in another precision. It is saved where no op
    holds the model's dtype, or a limit of it. Where that copy runs other ops, or can't be traced,
    those stay as they are.
    """
    own = model_dtype(model)
    limits = {getattr(torch.finfo(own), name) for name in _LIMITS}
    held = {leaf for node in ops_of(graph) for leaf in leaves_of(node) if type(leaf) is not slice}
    if own not in held and not limits & {leaf for leaf in held if isinstance(leaf, float)}:
        return
    other = torch.float32 if own == torch.float64 else torch.float64
    wider = [tensor.to(other) if tensor.is_floating_point() else tensor for tensor in tensors]
    try:
        twin, _ = trace(copy.deepcopy(model).to(other), wider)
    except (FxpipeError, RuntimeError):
        return
    if [*map(kind_of, ops_of(graph))] != [*map(kind_of, ops_of(twin))]:
        return
    flags = Flags(graph)
    for node, theirs in zip(ops_of(graph), ops_of(twin), strict=True):
        node.meta["dtype"] = _kind_of_dtype(node, theirs)
        places = iter(leaves_of(theirs))

        def opened(leaf: Any, node: fx.Node = node, places: Any = places) -> Any:
            twin = next(places)
            if leaf == own and twin == other:
                return flags.attribute(DTYPE)
            if isinstance(leaf, float) and leaf != twin:
                for name in _LIMITS:
                    if (leaf, twin) == tuple(getattr(torch.finfo(d), name) for d in (own, other)):
                        text = f"torch.finfo(dtype).{name}"
                        return flags.call(limit, (flags.attribute(DTYPE), name), text, node)
            return leaf

        if len(leaves_of(node)) == len(leaves_of(theirs)):
            node.args = fx.node.map_aggregate(node.args, opened)
            node.kwargs = fx.node.map_aggregate(node.kwargs, opened)


def _kind_of_dtype(node: fx.Node, theirs: fx.Node) -> str | None:
    """Whether a value's dtype is the model's `own` or `fixed`, as the other precision shows."""
    ours, other = node.meta.get("val"), theirs.meta.get("val")
    if not isinstance(ours, Tensor) or not isinstance(other, Tensor):
        return None
    return "fixed" if ours.dtype == other.dtype else "own"
