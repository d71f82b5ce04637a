"""Which ops give no gradient to what they read, whatever asks for gradients."""

import torch
from torch import Tensor, fx

from fxpipe.ir import Op
from fxpipe.ops.regions import PLAIN, REGION
from fxpipe.runtime.backward import differentiable

_DETACH = ("detach", torch.detach)


def gives_gradients(node: fx.Node, op: Op) -> bool:
    """Whether `node` may give gradients to what it reads."""
    if node.target in _DETACH or not node.meta.get(REGION, PLAIN).grad:
        return False
    made = node.meta.get("val")
    return bool(op.mutates) or not isinstance(made, Tensor) or differentiable(made)
