"""The model's own dtype, which tracing bakes into `x.to(other.dtype)`, made an input of the graph.

Which of the dtypes in a graph are the model's and which the user wrote as such can't be seen in
the graph: trace the model once more in another precision, and compare.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.interpret import DTYPE, model_dtype


def free_dtypes(
    found: fx.Graph,
    model: nn.Module,
    tensors: Sequence[Tensor],
    trace: Callable[[nn.Module, Sequence[Tensor]], fx.Graph],
) -> None:
    """Rewrite `found` in place so that it reads the attribute `dtype` where it means the model's.

    `trace` traces a model anew. Costs a second trace, but only for graphs that hold the model's
    dtype. If that one has other ops, dtypes stay as they are.
    """
    own = model_dtype(model)
    holders = [node for node in found.nodes if own in _leaves(node)]
    if not holders:
        return
    other = torch.float32 if own == torch.float64 else torch.float64
    wider = [t.to(other) if t.is_floating_point() else t for t in tensors]
    second = trace(copy.deepcopy(model).to(other), wider)
    pairs = list(zip(found.nodes, second.nodes, strict=False))
    if len(found.nodes) != len(second.nodes) or any(a.op != b.op for a, b in pairs):
        return
    with found.inserting_before(next(iter(found.nodes))):
        flag = found.create_node("get_attr", DTYPE)
    for node, twin in pairs:
        if node in holders:
            places = iter(_leaves(twin))

            def freed(leaf: Any, places: Any = places) -> Any:
                theirs = next(places)
                return flag if leaf == own and theirs == other else leaf

            if len(_leaves(twin)) == len(_leaves(node)):
                node.args = fx.node.map_aggregate(node.args, freed)
                node.kwargs = fx.node.map_aggregate(node.kwargs, freed)


def _leaves(node: fx.Node) -> list[Any]:
    """All arguments, in the order in which `map_aggregate` meets them."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return found
