"""The nodes of an autograd graph, for those who look at it before backward does."""

from collections.abc import Iterable, Iterator, Set

from torch.autograd.graph import Node


def nodes_below(roots: Iterable[Node], ends: Set[Node] = frozenset()) -> dict[Node, list[Node]]:
    """The nodes right below each node from the roots to the ends, once for each edge.

    A node comes after all below it. Nothing is looked for below `ends`.
    """
    below: dict[Node, list[Node]] = {}
    path: list[tuple[Node, list[Node], Iterator[Node]]] = []  # and what is left to look at
    for root in roots:
        left = iter([root])
        while True:
            for node in left:
                if node in below:
                    continue
                nodes = [] if node in ends else [n for n, _ in node.next_functions if n is not None]
                if not nodes:
                    below[node] = nodes
                    continue
                path.append((node, nodes, left))
                left = iter(nodes)
                break
            else:
                if not path:
                    break
                node, nodes, left = path.pop()
                below[node] = nodes
    return below
