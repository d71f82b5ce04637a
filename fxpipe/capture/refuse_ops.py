"""Ops of Dynamo's graph that no stage can be made of: torch alone has to have what they call."""

from types import FunctionType

import torch
from torch import fx
from torch.fx.node import Target
from torch.nn import functional

from fxpipe.capture.failures import ELSEWHERE, numpy_arrays, transforms_a_function
from fxpipe.capture.sources import where
from fxpipe.errors import CaptureError

# What a library calls only while it is traced, and what it calls otherwise: transformers' mixtures
# of experts (integrations/moe.py, _can_use_grouped_mm).
_OTHERWISE: dict[str, Target] = {"transformers::grouped_mm_fallback": functional.grouped_mm}

_AT_HAND = ("torch", "fxpipe")  # whose functions a trace may call


def refuse_op(node: fx.Node) -> None:
    """Raise CaptureError for an op that only Dynamo, or a library, can run."""
    if node.target is torch.Tensor.set_:
        raise CaptureError(
            f"forward assigns the `.data` of a tensor ({where(node)}): write a buffer in place, "
            "with copy_, or a parameter between steps, outside of forward"
        )
    if node.target in ("detach_", torch.detach_):
        raise CaptureError(
            f"forward detaches a tensor in place ({where(node)}), which those that read it later "
            "would not be told: write h = h.detach()"
        )
    if type(node.target).__name__.startswith("numpy_"):  # Dynamo's wrappers
        raise CaptureError(numpy_arrays(where(node)))
    applies = "autograd_function_apply" in str(node.target)
    # Before torch 2.13 Dynamo makes a Function of a hook.
    if "register_hook" in str(node.target) or (applies and "register_hook" in where(node)):
        raise CaptureError(
            f"forward registers a hook on a tensor ({where(node)}), which a package can't hold: "
            "where it changes gradients write a custom autograd.Function"
        )
    if applies:  # of a trace that was not ours
        raise CaptureError(
            f"a custom autograd.Function can't be captured within torch.compile ({where(node)}): "
            "compile the model by fxpipe.compile or the command"
        )
    if str(getattr(node.target, "__name__", "")).endswith("_increment_nesting"):
        raise CaptureError(transforms_a_function(where(node)))
    module = getattr(node.target, "__module__", "")
    if isinstance(node.target, FunctionType) and module.partition(".")[0] not in _AT_HAND:
        raise CaptureError(
            f"forward calls {module}.{node.target.__name__} ({where(node)}), which its library "
            f"has torch take for one op, and a package needs torch alone: {ELSEWHERE}"
        )
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        raise CaptureError(
            f"forward calls {str(node.target)!r} ({where(node)}), which takes functions, of "
            f"which no stage can be made: {ELSEWHERE}"
        )


def public(operator: torch._ops.OpOverloadPacket | torch._ops.OpOverload, node: fx.Node) -> Target:
    """The same function as torch alone has it, or `operator` if that is torch's own."""
    name = str(operator).replace(".", "::", 1)
    if name in _OTHERWISE:
        return _OTHERWISE[name]
    library = name.partition("::")[0]
    if library not in ("aten", "prims"):
        raise CaptureError(
            f"the operator {name!r} is registered by the library {library!r}, and a package needs "
            f"torch alone ({where(node)}): choose another implementation in the model's settings, "
            f"or {ELSEWHERE}"
        )
    return operator
