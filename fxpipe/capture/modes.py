"""Train mode and dtype, which tracing bakes into a graph, made inputs of the graph again.

`F.dropout(x, 0.1, True)` becomes `F.dropout(x, 0.1, self.training)`, the `dropout_p` of attention
`0.1 if self.training else 0.0`, and `x.to(torch.float32)`, where it was `x.to(y.dtype)`,
`x.to(dtype)`. Which constants depend on the mode, and which the user wrote as such, can't be seen
in one graph: the model is traced once more, in eval mode and another precision, and compared.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.capture.dynamo import FlatModel
from fxpipe.errors import CaptureError
from fxpipe.interpret import DTYPE, TRAINING, model_dtype

Trace = Callable[[FlatModel, Sequence[Tensor]], fx.Graph]
_ATTENTION: object = torch._C._nn.scaled_dot_product_attention


def when_training(training: bool, probability: float) -> float:
    """The dropout probability in force."""
    return probability if training else 0.0


def free_modes(graph: fx.Graph, model: FlatModel, tensors: Sequence[Tensor], trace: Trace) -> None:
    """Rewrite `graph` in place so that it reads `training` and `dtype` where it means them.

    `trace` gives the graph of another model with stock modules called, as `graph` is. It is saved
    where no op holds a constant that could depend on the mode. Where train and eval mode run
    different ops, only dtypes are compared.
    """
    own = model_dtype(model)
    if not any(_may_depend(node, own) for node in _ops(graph)):
        return
    other = torch.float32 if own == torch.float64 else torch.float64
    twins = _twins(graph, model, [_cast(tensor, other) for tensor in tensors], other, trace)
    with graph.inserting_before(next(iter(graph.nodes))):
        training, dtype = graph.get_attr(TRAINING), graph.get_attr(DTYPE)
    training.meta["text"], dtype.meta["text"] = "self.training", DTYPE
    for node, twin in twins:
        theirs = _leaves(twin)
        if len(theirs) != len(_leaves(node)):
            continue
        places = iter(theirs)

        def freed(leaf: Any, node: fx.Node = node, places: Iterator[Any] = places) -> Any:
            twin = next(places)
            if leaf == own and twin == other:
                return dtype
            if leaf is True and twin is False:
                return training
            if isinstance(leaf, float) and isinstance(twin, float) and leaf != twin == 0.0:
                return _when_training(graph, node, training, leaf)
            return leaf

        node.args = fx.node.map_aggregate(node.args, freed)
        node.kwargs = fx.node.map_aggregate(node.kwargs, freed)
    for flag in (training, dtype):
        if not flag.users:
            graph.erase_node(flag)


def _ops(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op.startswith("call_")]


def _may_depend(node: fx.Node, own: torch.dtype) -> bool:
    if node.op == "call_module":
        return False
    leaves = _leaves(node)
    return own in leaves or True in leaves or node.target is _ATTENTION


def _twins(
    graph: fx.Graph, model: FlatModel, tensors: Sequence[Tensor], other: torch.dtype, trace: Trace
) -> list[tuple[fx.Node, fx.Node]]:
    """Each op with that of the other trace; none if neither mode runs the same ops."""
    for training in (False, True):
        try:
            second = trace(copy.deepcopy(model).to(other).train(training), tensors)
        except (CaptureError, RuntimeError):
            continue  # a mode or precision that the model itself does not support
        pairs = list(zip(_ops(graph), _ops(second), strict=False))
        same = all((a.op, str(a.target)) == (b.op, str(b.target)) for a, b in pairs)
        if same and len(_ops(graph)) == len(_ops(second)):
            return pairs
    return []


def _when_training(
    graph: fx.Graph, node: fx.Node, training: fx.Node, probability: float
) -> fx.Node:
    with graph.inserting_before(node):
        freed = graph.call_function(when_training, (training, probability))
    freed.meta["text"] = f"{probability!r} if self.training else 0.0"
    return freed


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _leaves(node: fx.Node) -> list[Any]:
    """All arguments, in the order in which `map_aggregate` meets them."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return found
