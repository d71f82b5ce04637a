"""What torch.compile gets wrong is written otherwise before inductor comes to it.

Of `torch.add(x, a @ b, alpha=s)` inductor makes `addmm(x, a, b)`, and `s` is lost (torch 2.11 and
2.13): it looks for sums with a product of matrices, and not at their `alpha`.
"""

from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

_aten = torch.ops.aten


class WrittenOut(CustomGraphPass):
    """The pass that inductor runs before its own; compiled code is cached by what stands here."""

    def __call__(self, graph: Graph) -> None:
        """Write the multiplication out in each sum that may be one with a product of matrices."""
        for node in graph.find_nodes(op="call_function", target=_aten.add.Tensor):
            alpha, other = node.kwargs.get("alpha", 1), node.args[1]
            # Of numbers, and of tensors of several dtypes or dimensions, it makes no `addmm`.
            if alpha == 1 or node.meta["val"].dim() != 2 or not _is_alike(other, node):
                continue
            with graph.inserting_before(node):
                scaled = graph.call_function(_aten.mul.Tensor, (other, alpha))
            scaled.meta["val"] = _aten.mul.Tensor(_value(other), _value(alpha))
            node.args, node.kwargs = (node.args[0], scaled), {}

    def uuid(self) -> bytes:
        """What it is, for that cache."""
        return get_hash_for_files((__file__,))


def _is_alike(other: Any, node: Node) -> bool:
    value = _value(other)
    return isinstance(value, Tensor) and value.dtype == node.meta["val"].dtype


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument
