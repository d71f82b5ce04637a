"""A stage's backward in two: the gradients of its inputs first, those of its weights later.

The zero-bubble schedules ask for it (Qi et al., ICLR 2024): the stage before waits for the first
alone. Some nodes of the graph lead on to an input and, by another edge, to a weight: a linear layer
has one. On the way to the inputs the gradient that arrives at each such node is kept; later the
node runs once more, for the weight alone. What leads to weights only runs later altogether, as a
whole backward does, and lets go of what was saved on its way.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from fxpipe.runtime.backward import backward
from fxpipe.runtime.nodes import nodes_below
from fxpipe.runtime.weight_gradients import add_directly

_Gradients = tuple[Tensor | None, ...]


@dataclass(slots=True)
class _Arrived:
    """The gradients that came to a node, and whether any shall pass now.

    A weight that two nodes use may be reached from the one through the other, whose share would
    count twice (pytorch#180952).
    """

    gradients: _Gradients = ()
    passing: bool = True

    def __call__(self, gradients: _Gradients) -> _Gradients | None:
        if not self.passing:
            return (None,) * len(gradients)
        self.gradients = tuple(map(_alone, gradients))
        return None


def _alone(gradient: Tensor | None) -> Tensor | None:
    """A copy of what is a view of more, as of what `torch.cat` joined: that shall not wait too."""
    if gradient is None or gradient.untyped_storage().nbytes() <= gradient.nbytes:
        return gradient
    return gradient.clone()


@dataclass(frozen=True, slots=True)
class _Fork:
    """A node that leads to an input and, by another edge, to `weights`."""

    node: Node
    weights: Sequence[Tensor]
    arrived: _Arrived = field(default_factory=_Arrived)

    def edges(self) -> list[tuple[GradientEdge, Tensor]]:
        """Where in the node gradients arrived, and which."""
        return [
            (GradientEdge(self.node, k), gradient)
            for k, gradient in enumerate(self.arrived.gradients)
            if gradient is not None
        ]


class SplitBackward:
    """The backward of a graph whose outputs are at the edges `outputs`, half by half.

    `whole(edges, gradients)` runs what leads to weights only, and frees that graph.
    """

    def __init__(
        self,
        outputs: Sequence[GradientEdge | None],
        gradients: Sequence[Tensor | None],
        whole: Callable[[Sequence[GradientEdge], Sequence[Tensor]], None] = backward,
    ) -> None:
        self._whole = whole
        self._roots = [
            (edge, gradient)
            for edge, gradient in zip(outputs, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        self._forks: list[_Fork] = []

    def input_gradients(self, inputs: Sequence[GradientEdge]) -> list[Tensor | None]:
        """The gradients that arrive at `inputs`, which were the beginning of the graph."""
        ends = {edge.node for edge in inputs}
        below = nodes_below([edge.node for edge, _ in self._roots], ends)
        leading = _leading_to(ends, below)
        for node in leading:
            others = [n for n in below[node] if n not in leading]
            if others and (weights := _weights(others, below)):
                fork = _Fork(node, weights)
                node.register_prehook(fork.arrived)
                self._forks.append(fork)
        to_inputs = [root for root in self._roots if root[0].node in leading]
        self._roots = [root for root in self._roots if root[0].node not in leading]
        if not to_inputs:
            return [None] * len(inputs)
        edges, gradients = zip(*to_inputs, strict=True)
        found = torch.autograd.grad(edges, inputs, gradients, retain_graph=True, allow_unused=True)
        return list(found)

    @property
    def waiting(self) -> list[Tensor]:
        """The gradients that are kept for the second half."""
        edges = [*self._roots, *(edge for fork in self._forks for edge in fork.edges())]
        return [gradient for _, gradient in edges]

    def weight_gradients(self) -> None:
        """Add the gradients of the weights to their `.grad`; then the graph is let go."""
        for fork in self._forks:
            fork.arrived.passing = False
        for fork in self._forks:
            if add_directly(fork.node, fork.arrived.gradients, fork.weights):
                continue
            fork.arrived.passing = True
            if came := fork.edges():
                edges, gradients = zip(*came, strict=True)
                written = written_anyway(fork.node)
                reached = [*fork.weights, *written]
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=reached)
                for tensor in written:  # would keep it until the graph is let go
                    tensor.grad = None
            fork.arrived.passing = False
        if self._roots:
            edges, gradients = zip(*self._roots, strict=True)
            self._whole(edges, gradients)
        self._roots, self._forks = [], []


def written_anyway(node: Any) -> list[Tensor]:
    """What a node writes a gradient of even if only its weights' are asked for.

    A group norm on channels-last memory does on a CPU, to where nothing is: the process dies.
    """
    if node.name() != "NativeGroupNormBackward0" or node._saved_input.is_contiguous():
        return []
    return [node._saved_input]


def _leading_to(ends: Set[Node], below: Mapping[Node, Sequence[Node]]) -> dict[Node, None]:
    """The nodes that lead to one of `ends`, those with it, in the order of `below`."""
    leading: dict[Node, None] = {}
    for node, nodes in below.items():
        if node in ends or not leading.keys().isdisjoint(nodes):
            leading[node] = None
    return leading


def _weights(nodes: Iterable[Node], below: Mapping[Node, Sequence[Node]]) -> list[Tensor]:
    """The leaves at `nodes` and below, which lead to no input."""
    found: dict[Node, Any] = {}
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            # Asked of an inner node, torch takes longer to say that it has none.
            found[node] = None if below[node] else getattr(node, "variable", None)
            left += below[node]
    return [leaf for leaf in found.values() if leaf is not None]
