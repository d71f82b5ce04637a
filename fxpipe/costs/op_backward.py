"""What the backward of one op takes: time, memory, and gradients that wait for its second half."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from fxpipe.costs.counted import bytes_added, most_bytes
from fxpipe.costs.stopwatch import Clock
from fxpipe.memory import storage_of
from fxpipe.runtime.split import SplitBackward
from fxpipe.runtime.whole_backward import added_bytes, backward_of

_Roots = tuple[list[GradientEdge], list[Tensor]]


def backward_ms(clock: Clock, result: Any, leaves: Sequence[Tensor]) -> float:
    """Milliseconds from the results' gradients to those of `leaves`."""
    made, wanted = with_gradient(result), trained(leaves)
    if not made or not wanted:
        return 0.0
    return clock(partial(gradients_of, made, wanted), lambda: ones(made))


def backward_bytes(result: Any, leaves: Sequence[Tensor], device: torch.device) -> int:
    """Bytes that this takes at its fullest, besides the results' gradients and what is saved."""
    made, wanted = with_gradient(result), trained(leaves)
    if not made or not wanted:
        return 0
    gradients = ones(made)
    return most_bytes(lambda: gradients_of(made, wanted, gradients), device)[1]


def step_bytes(run: Callable[[], Any], weights: Sequence[Tensor], device: torch.device) -> int:
    """The same for the backward of what `run` gives as a whole one is in a step.

    It lets go of the graph on its way, and adds the gradients of `weights` to theirs, one by one.
    """

    def begin() -> tuple[Any, _Roots]:
        result = run()
        for weight in trained(weights):
            weight.grad = torch.zeros_like(weight)
        made = with_gradient(result)
        edges = [get_gradient_edge(tensor) for tensor in made]
        return result, (edges, ones(made))

    def backward(begun: tuple[Any, _Roots]) -> None:
        edges, gradients = begun[1]
        if edges:
            backward_of(weights)(edges, gradients)

    return bytes_added(begin, backward, device)


def without_gradient(result: Any, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Those of `leaves` that want a gradient and get none."""
    made, wanted = with_gradient(result), trained(leaves)
    if not made or not wanted:
        return wanted
    found = gradients_of(made, wanted, ones(made))
    return [leaf for leaf, gradient in zip(wanted, found, strict=True) if gradient is None]


def bytes_added_to(result: Any, weights: Sequence[Tensor]) -> int:
    """Bytes among these of gradients that a step adds straight to those of `weights`."""
    return added_bytes([get_gradient_edge(tensor) for tensor in with_gradient(result)], weights)


def arriving_bytes(result: Any, inputs: Sequence[Tensor], turned: bool) -> int:
    """Bytes of gradients that wait for the second half of a backward, layer by layer.

    An op may have several layers within: an attention module has two. A gradient may come in
    another layout than the result's, as `turned` ones do, of which a layer makes a copy.
    """
    made = with_gradient(result)
    split = SplitBackward([get_gradient_edge(t) for t in made], ones(made, turned))
    split.input_gradients([get_gradient_edge(tensor) for tensor in trained(inputs)])
    sizes = {storage_of(t): t.untyped_storage().nbytes() for t in split.waiting}
    return sum(sizes.values())


def with_gradient(result: Any) -> list[Tensor]:
    """The results that a gradient goes through.

    A view of a parameter that was taken under `no_grad` says that it requires one, and has no way.
    """
    return [tensor for tensor in tensors(result) if tensor.grad_fn is not None]


def tensors(tree: Any) -> list[Tensor]:
    """The tensors within."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def gradients_of(
    made: Sequence[Tensor], wanted: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Those of `wanted`, the graph being kept; None for what gets none."""
    return torch.autograd.grad(made, wanted, gradients, retain_graph=True, allow_unused=True)


def trained(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Those of `leaves` that want a gradient."""
    return [leaf for leaf in leaves if leaf.requires_grad]


def ones(made: Sequence[Tensor], turned: bool = False) -> list[Tensor]:
    """Gradients for these results, in their layouts or as those of transposed ones come."""
    return [_turned_ones(t) if turned else torch.ones_like(t) for t in made]


def _turned_ones(like: Tensor) -> Tensor:
    """Ones in the layout of a transposed gradient."""
    if like.dim() < 2:
        return torch.ones_like(like)
    turned = like.transpose(-1, -2)
    return torch.ones_like(turned, memory_format=torch.contiguous_format).transpose(-1, -2)
