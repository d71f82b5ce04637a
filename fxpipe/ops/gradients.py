"""Which ops give no gradient to what they read, whatever asks for gradients."""

import torch
from torch import Tensor, fx, nn

from fxpipe.ir import Capture, Op
from fxpipe.ops.regions import PLAIN, REGION
from fxpipe.ops.specs import tensor_spec
from fxpipe.runtime.backward import differentiable

_DETACH = ("detach", torch.detach)


def ends_gradients(node: fx.Node) -> bool:
    """Whether `node` detaches, or stands under no_grad."""
    return node.target in _DETACH or not node.meta.get(REGION, PLAIN).grad


def gives_gradients(node: fx.Node, op: Op) -> bool:
    """Whether `node` may give gradients to what it reads."""
    made = node.meta.get("val")
    differs = bool(op.mutates) or not isinstance(made, Tensor) or differentiable(made)
    return differs and (not ends_gradients(node) or _hands_on(node, op))


def may_have_gradients(capture: Capture) -> set[str]:
    """The values that may have gradients, whichever inputs and parameters ask for them."""
    found: set[str] = set()
    written: set[str] = set()  # memories, by ops that may give gradients

    def may(node: fx.Node) -> bool:
        if node.op == "placeholder" or isinstance(node.meta.get("val"), nn.Parameter):
            return True
        return node.name in found or not written.isdisjoint(capture.memories(node))

    for node in capture.graph.nodes:
        op = capture.ops.get(node.name)
        begins = node.op == "call_module" or any(map(may, node.all_input_nodes))
        if op is not None and begins and gives_gradients(node, op):
            found.add(node.name)
            written.update(op.mutates)
    return {node.name for node in capture.graph.nodes if may(node)}


def _hands_on(node: fx.Node, op: Op) -> bool:
    """Whether what is made under no_grad may be the tensor that is given, with its gradients.

    A cast to the dtype that it has gives that, and an op in place.
    """
    if node.target in _DETACH or op.memories == (node.name,):
        return False
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    made, *given = (tensor_spec(v).shape if isinstance(v, Tensor) else None for v in values)
    return made in given
