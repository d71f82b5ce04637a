"""Gradients of a layer's weights, added straight to their `.grad`.

Autograd would be asked for each layer by itself, look through all of the graph below it, and make
each gradient in memory of its own before it is added. From what the node of a linear layer has
saved it takes one product that adds its result (Megatron-LM has a kernel of its own that fuses the
two); those of other layers are made by the op that autograd would call.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

# Adds to weights' `.grad` what a gradient of a node's output gives.
Add = Callable[[Tensor], None]
_Rule = Callable[[Node, Sequence[Tensor]], Add | None]


def add_directly(node: Node, gradients: Sequence[Tensor | None], weights: Sequence[Tensor]) -> bool:
    """Add what `gradients`, of the node's outputs, give to the `.grad` of its `weights`.

    False, with nothing done, if `adding` knows no way.
    """
    gradient, *others = gradients or (None,)
    if gradient is None or any(other is not None for other in others):
        return False
    add = adding(node, weights)
    if add is None:
        return False
    with torch.no_grad():
        add(gradient)
    return True


def adding(node: Node, weights: Sequence[Tensor]) -> Add | None:
    """What adds to the `.grad` of its `weights` what a gradient of the node's output gives.

    None if the node is of another kind, leads to its weights by other nodes, or if somebody wants
    to see their gradients. What the node has saved is read once that is called.
    """
    rule = _RULES.get(node.name())
    if rule is None or not all(map(_is_plain, weights)):
        return None
    if any(torch.is_autocast_enabled(weight.device.type) for weight in weights):
        return None
    return rule(node, weights)


def _linear(node: Any, weights: Sequence[Tensor]) -> Add | None:
    """`addmm(bias, x, weight)`, or the weight transposed, as `F.linear` has it."""
    bias, (weight, transposed) = _leaf(node, 0), _factor(node, 2)
    if not _are(weights, bias, weight) or node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    if bias is not None and (bias.dim() != 1 or bias.numel() == 1):
        return None  # it may be one for several outputs

    def add(gradient: Tensor) -> None:
        if weight is not None:
            _add_product(weight, transposed, node._saved_mat1, gradient)
        if bias is not None:
            _add(bias, gradient.sum(0))

    return add


def _linear_without_bias(node: Any, weights: Sequence[Tensor]) -> Add | None:
    """`mm(x, weight)`, or the weight transposed."""
    weight, transposed = _factor(node, 1)
    if weight is None or not _are(weights, weight):
        return None
    return lambda gradient: _add_product(weight, transposed, node._saved_self, gradient)


def _by(op: Callable[..., tuple[Tensor, ...]], saved: str) -> _Rule:
    """The rule of a layer whose input, weight and bias all get their gradients from `op`.

    It takes the output's gradient, what the node has `saved`, and which gradients are wanted.
    """
    names = [f"_saved_{name}" for name in saved.split()]

    def rule(node: Any, weights: Sequence[Tensor]) -> Add | None:
        weight, bias = _leaf(node, 1), _leaf(node, 2)
        if not _are(weights, weight, bias):
            return None

        def add(gradient: Tensor) -> None:
            given = (getattr(node, name) for name in names)
            wanted = [False, weight is not None, bias is not None]
            for leaf, one in zip((weight, bias), op(gradient, *given, wanted)[1:], strict=True):
                if leaf is not None:
                    _add(leaf, one)

        return add

    return rule


_aten = torch.ops.aten

_RULES: Mapping[str, _Rule] = {
    "AddmmBackward0": _linear,
    "MmBackward0": _linear_without_bias,
    "NativeLayerNormBackward0": _by(
        _aten.native_layer_norm_backward.default,
        "input normalized_shape result1 result2 weight bias",
    ),
    "NativeBatchNormBackward0": _by(
        _aten.native_batch_norm_backward.default,
        "input weight running_mean running_var result1 result2 training eps",
    ),
    "ConvolutionBackward0": _by(
        _aten.convolution_backward.default,
        "input weight bias_sym_sizes_opt stride padding dilation transposed output_padding groups",
    ),
}


def _add_product(weight: Tensor, transposed: bool, x: Tensor, gradient: Tensor) -> None:
    first, second = (gradient, x) if transposed else (x, gradient)
    if weight.grad is None:
        weight.grad = torch.mm(first.t(), second)
    else:
        weight.grad.addmm_(first.t(), second)


def _add(weight: Tensor, found: Tensor) -> None:
    if weight.grad is None:
        weight.grad = found
    else:
        weight.grad.add_(found)


def _leaf(node: Node, k: int) -> Tensor | None:
    """The leaf that the node's input k is."""
    below, _ = node.next_functions[k]
    return getattr(below, "variable", None)


def _factor(node: Node, k: int) -> tuple[Tensor | None, bool]:
    """The leaf that the node's input k is made of, and whether it is transposed."""
    below, _ = node.next_functions[k]
    if below is not None and below.name() == "TBackward0":
        return _leaf(below, 0), True
    return _leaf(node, k), False


def _are(weights: Sequence[Tensor], *leaves: Tensor | None) -> bool:
    """Whether the leaves are all the weights there are, each once."""
    return sorted(map(id, weights)) == sorted(id(leaf) for leaf in leaves if leaf is not None)


def _is_plain(weight: Tensor) -> bool:
    """Whether nothing sees its gradient before it is added."""
    plain = type(weight) in (nn.Parameter, Tensor) and not weight.is_complex()
    return plain and not has_hooks(weight)


def has_hooks(weight: Tensor) -> bool:
    """Whether a hook sees its gradient, before or after it is added."""
    after = getattr(weight, "_post_accumulate_grad_hooks", None)
    return bool(weight._backward_hooks or after)
