"""The model's own dtype, which tracing bakes into a graph, made an input of it again.

What was read off a parameter becomes `dtype`, which a stage reads off any parameter that it holds.
So does `torch.float32` in `x.to(torch.float32)` where Python made it of tensors' dtypes. Which ones
the user wrote as such can't be seen in one graph: the model is run, or traced, in another precision
too.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.capture.dynamo import FlatModel
from fxpipe.capture.edit import Flags, Trace, kind_of, leaves_of, ops_of
from fxpipe.capture.follow import follow
from fxpipe.capture.simplify import CASTS
from fxpipe.errors import FxpipeError
from fxpipe.ops.interpret import DTYPE, limit, model_dtype, reads_dtype
from fxpipe.precision import in_precision, set_precision

_LIMITS = ("min", "max", "eps", "tiny")


def open_dtypes(
    graph: fx.Graph,
    model: FlatModel,
    modules: Mapping[str, nn.Module],
    state: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    trace: Trace,
) -> bool:
    """Rewrite `graph`, traced in train mode, so that it reads the model's dtype where it means it.

    Nothing is to be done where no op asks for the model's dtype, or holds it or a limit of it. What
    is meant is seen by running the model in another precision, or else by `trace`, which gives the
    graph of a copy of it. Where that copy runs other ops, or can't be traced, constants stay as
    they are. Returns whether they do: the graph may then be right in this dtype alone.
    """
    own = model_dtype(model)
    other = torch.float32 if own == torch.float64 else torch.float64
    swaps: dict[Any, Any] = {limit(own, name): limit(other, name) for name in _LIMITS}
    swaps[own] = other
    asks = any(node.target == DTYPE for node in graph.nodes)
    named = any(_names(node, own, swaps) for node in ops_of(graph))
    if not asks and not named:
        return False
    wider = [in_precision(tensor, other) for tensor in tensors]
    followed = follow(graph, model, modules, state, wider, swaps, other)
    if followed is not None:
        for node, value in followed.values.items():
            node.meta["dtype"] = _kind_of_dtype(node, value)
        for node in followed.opened:
            _open(graph, node, [swaps.get(leaf) for leaf in _constants(node)], own, other)
        return False
    try:
        twin, _ = trace(set_precision(copy.deepcopy(model), other), wider)
    except (FxpipeError, RuntimeError):
        return named
    if [*map(kind_of, ops_of(graph))] != [*map(kind_of, ops_of(twin))]:
        return True
    for node, theirs in zip(ops_of(graph), ops_of(twin), strict=True):
        node.meta["dtype"] = _kind_of_dtype(node, theirs.meta.get("val"))
        if len(leaves_of(node)) == len(leaves_of(theirs)):
            _open(graph, node, _constants(theirs), own, other)
    return False


def share_reads(graph: fx.Graph, model: FlatModel) -> None:
    """Let all reads of the model's dtype off its parameters be one in `graph`.

    So no stage holds a parameter for its dtype alone. What has another, or is a buffer, is read
    itself.
    """
    own, flags = model_dtype(model), Flags(graph)
    parameters = dict(model.model.named_parameters(remove_duplicate=False))
    for read in [node for node in graph.nodes if reads_dtype(node)]:
        (of,) = read.all_input_nodes
        if of.target == DTYPE:
            read.replace_all_uses_with(flags.limit(str(read.args[1])))
        elif of.target in parameters and parameters[str(of.target)].dtype == own:
            read.replace_all_uses_with(flags.attribute(DTYPE))
        else:
            continue
        graph.erase_node(read)


def _names(node: fx.Node, own: torch.dtype, swaps: Mapping[Any, Any]) -> bool:
    """Whether an op says the model's dtype `own`, or a limit of it."""
    casts = node.op == "call_method" and CASTS.get(str(node.target)) == own
    return casts or any(leaf in swaps for leaf in _constants(node) if leaf is not None)


def _kind_of_dtype(node: fx.Node, other: Any) -> str | None:
    """Whether a value's dtype is the model's `own` or `fixed`, as the other precision shows."""
    ours = node.meta.get("val")
    if not isinstance(ours, Tensor) or not isinstance(other, Tensor):
        return None
    return "fixed" if ours.dtype == other.dtype else "own"


def _constants(node: fx.Node) -> list[Any]:
    """The leaves of a node that could depend on a dtype, None for others."""
    return [leaf if isinstance(leaf, float | torch.dtype) else None for leaf in leaves_of(node)]


def _open(
    graph: fx.Graph, node: fx.Node, theirs: Sequence[Any], own: torch.dtype, other: torch.dtype
) -> None:
    """Read the model's dtype where `theirs`, the leaves in another precision, tell that."""
    flags = Flags(graph)
    leaves = iter(theirs)

    def opened(leaf: Any) -> Any:
        twin = next(leaves)
        if leaf == own and twin == other:
            return flags.attribute(DTYPE)
        if isinstance(leaf, float) and leaf != twin:
            for name in _LIMITS:
                if (leaf, twin) == (limit(own, name), limit(other, name)):
                    return flags.limit(name)
        return leaf

    node.args = fx.node.map_aggregate(node.args, opened)
    node.kwargs = fx.node.map_aggregate(node.kwargs, opened)
