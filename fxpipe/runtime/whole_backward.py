"""A stage's backward that adds the gradients of large weights to their `.grad` as it makes them.

Autograd makes each in memory of its own, and reads both again to add them: where weights are of
some MiB, that is a fiftieth of a step of transformer blocks on a CPU (see `weight_gradients`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from fxpipe.runtime.backward import backward
from fxpipe.runtime.nodes import nodes_below
from fxpipe.runtime.weight_gradients import Add, adding

# To look through the graph takes as long as is gained with smaller ones.
_LARGE_BYTES = 2**21
# Which of a product's inputs is the layer's own; the others lead to its weights.
_INPUT = {"AddmmBackward0": 1, "MmBackward0": 0}
# Torch's reentrant checkpoint, and others' like it, refuse a backward to chosen leaves.
_TO_ALL = "CheckpointFunctionBackward"

_Edges = Sequence[GradientEdge]


@dataclass(frozen=True, slots=True)
class _Product:
    """A node that multiplies by `weight`; as a hook, it adds to the `.grad` of its `leaves`."""

    node: Node
    weight: Tensor
    leaves: Sequence[Node]
    add: Add

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        (gradient,) = gradients
        if gradient is not None:
            self.add(gradient)


def backward_of(weights: Iterable[Tensor]) -> Callable[[_Edges, Sequence[Tensor]], None]:
    """The one that is faster for a stage of these weights: `whole_backward`, or `backward`."""
    return whole_backward if any(map(_is_large, weights)) else backward


def whole_backward(edges: _Edges, gradients: Sequence[Tensor]) -> None:
    """`backward`, in which products by large weights add to their gradients."""
    below = nodes_below(edge.node for edge in edges)
    products = [*_products(below)]
    if not products:
        backward(edges, gradients)
        return
    ours = {leaf for product in products for leaf in product.leaves}
    # Below a product's input there is one of the others: so autograd comes to each product.
    others: list[Any] = [n for n, nodes in below.items() if not nodes and n not in ours]
    hooks = [product.node.register_prehook(product) for product in products]
    try:
        backward(edges, gradients, [leaf.variable for leaf in others])
    finally:
        for hook in hooks:  # each is held by the node that it holds
            hook.remove()


def added_bytes(edges: _Edges, weights: Sequence[Tensor]) -> int:
    """Bytes of the gradients of `weights` for which `whole_backward` makes no memory."""
    products = _products(nodes_below(edge.node for edge in edges))
    return sum(p.weight.nbytes for p in products if any(p.weight is weight for weight in weights))


def _products(below: Mapping[Node, Sequence[Node]]) -> Iterator[_Product]:
    """Those by a large weight of which nothing else is made, on the way to an input."""
    if any(node.name() == _TO_ALL for node in below):
        return
    uses = Counter(chain.from_iterable(below.values()))
    for node in below:
        place = _INPUT.get(node.name())
        if place is None:
            continue
        to = [n for n, _ in node.next_functions]
        if to.pop(place) is None or to[-1] is None:
            continue
        path = [n for n in to if n is not None]
        path += below[to[-1]]  # what the weight is the transpose of
        leaves: list[Any] = [n for n in path if not below[n]]
        weights = [leaf.variable for leaf in leaves]
        if weights and _is_large(weights[-1]) and all(uses[n] == 1 for n in path):
            add = adding(node, weights)
            if add is not None:
                yield _Product(node, weights[-1], leaves, add)


def _is_large(weight: Tensor) -> bool:
    """On a GPU none is, as the host, which looks through the graph, has to stay ahead of it.

    But where a step is captured, which the host does once.
    """
    if weight.nbytes < _LARGE_BYTES:
        return False
    return weight.device.type != "cuda" or torch.cuda.is_current_stream_capturing()
