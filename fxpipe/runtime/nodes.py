"""The nodes of an autograd graph, for those who look at it before backward does."""

from collections.abc import Iterable, Set

from torch.autograd.graph import Node


def nodes_below(roots: Iterable[Node], ends: Set[Node] = frozenset()) -> dict[Node, list[Node]]:
    """The nodes right below each node from the roots to the ends, once for each edge.

    A node comes after all below it. Nothing is looked for below `ends`.
    """
    below: dict[Node, list[Node]] = {}
    met: dict[Node, list[Node]] = {}
    left = list(roots)
    while left:
        node = left[-1]
        if node not in met:
            # Each asks torch for the nodes, which takes most of the time: once.
            met[node] = [] if node in ends else [n for n, _ in node.next_functions if n is not None]
            left += [n for n in met[node] if n not in below]
        else:
            below.setdefault(node, met[node])
            left.pop()
    return below
