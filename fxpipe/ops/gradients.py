"""Which ops give no gradient to what they read, whatever asks for gradients."""

import torch
from torch import Tensor, fx

from fxpipe.ir import Op
from fxpipe.ops.regions import PLAIN, REGION
from fxpipe.runtime.backward import differentiable

_DETACH = ("detach", torch.detach)


def ends_gradients(node: fx.Node) -> bool:
    """Whether `node` detaches, or stands under no_grad."""
    return node.target in _DETACH or not node.meta.get(REGION, PLAIN).grad


def gives_gradients(node: fx.Node, op: Op) -> bool:
    """Whether `node` may give gradients to what it reads."""
    made = node.meta.get("val")
    differs = bool(op.mutates) or not isinstance(made, Tensor) or differentiable(made)
    return differs and not ends_gradients(node)
