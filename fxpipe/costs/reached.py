"""Which ops a gradient comes back to: to none that leads to an integer or a `detach` alone."""

from torch import fx

from fxpipe.costs.of_weights import has_gradient
from fxpipe.ir import Capture


def reached(capture: Capture) -> set[fx.Node]:
    """The nodes on a way to an output on which all results have a gradient.

    What an op writes may be read by another name: it is taken to be.
    """
    found: set[fx.Node] = set()
    for node in reversed(capture.graph.nodes):
        op = capture.ops.get(node.name)
        if op is not None and op.mutates:
            found.add(node)
        if node.op == "output" or (node in found and has_gradient(node)):
            found.update(node.all_input_nodes)
    return found
