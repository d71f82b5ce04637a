"""Which values are made of parameters and buffers: their gradients are for weights alone."""

from torch import fx

from fxpipe.costs.op_backward import tensors


def of_weights(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that read parameters and buffers, or what is made of them, and no other values.

    But it does not matter what picks rows of a parameter, as a router does of its experts': that is
    computed from values with a gradient, and has none.
    """
    found: set[fx.Node] = set()
    picking: set[fx.Node] = set()
    for node in graph.nodes:
        # A number among the arguments, such as a batch's size, makes it of nothing else.
        read = {used for used in node.all_input_nodes if tensors(used.meta.get("val"))}
        weights = {used for used in read if used.op == "get_attr" or used in found}
        if weights and read <= weights | picking:
            found.add(node)
        elif not has_gradient(node):
            computed = {used for used in read - weights if used in picking or has_gradient(used)}
            if computed and read == weights | computed:
                picking.add(node)
    return found


def has_gradient(node: fx.Node) -> bool:
    """Whether what the node makes needs one."""
    return any(tensor.requires_grad for tensor in tensors(node.meta.get("val")))
