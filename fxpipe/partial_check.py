"""Whether a model gives the same with a part of it apart, as a pipeline will run that.

Of the part the rest then sees what it returns alone: no attribute that it leaves behind, and of
what several modules are given, what it is when the last one is called.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fxpipe.capture.names import model_names
from fxpipe.memory import lacks_memory
from fxpipe.ops.contents import Contents
from fxpipe.ops.interpret import untouched
from fxpipe.runtime.manifest import PartSpec
from fxpipe.runtime.splicing import stand_in

_TOLERANCE = 1e-5


def stands_apart(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    modules: Sequence[nn.Module],
    spec: PartSpec,
    part: Callable[..., Any],
) -> bool:
    """Whether outputs and gradients are the model's if `part` computes what `modules` do.

    Of a model without memory, no numbers can be compared: it is taken to be so.
    """
    if lacks_memory(model):
        return True
    state = model_names(model).state

    def apart(**given: Any) -> Any:
        forwards = [vars(module).pop("forward") for module in modules]
        held = Contents(model, state)
        try:
            return part(**given)
        finally:
            held.put_back()
            for module, forward in zip(modules, forwards, strict=True):
                module.forward = forward

    expected = _numbers(model, args, kwargs, state)
    stand_in(modules, spec, apart)
    try:
        found = _numbers(model, args, kwargs, state)
    except Exception:  # what the rest reads is not there
        return False
    finally:
        for module in modules:
            del module.forward
    return len(found) == len(expected) and all(map(_close, found, expected))


def _numbers(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Mapping[str, Tensor]
) -> list[Tensor | None]:
    """The tensors of the output of one call in train mode, and the gradients of their sum."""
    args, kwargs = tree_map(_copy, (args, dict(kwargs)))
    with untouched(model, state), torch.enable_grad():
        model.train()
        torch.manual_seed(0)
        given = tree_leaves(model(*args, **kwargs))
        outputs = [one for one in given if isinstance(one, Tensor)]
        trained = [p for p in model.parameters() if p.requires_grad]
        roots = [one for one in outputs if one.requires_grad]
        gradients: Sequence[Tensor | None] = ()
        if roots and trained:
            ones = [torch.ones_like(root) for root in roots]
            gradients = torch.autograd.grad(roots, trained, ones, allow_unused=True)
    return [*(one.detach().clone() for one in outputs), *gradients]


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _close(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found.shape == expected.shape and torch.allclose(
        found, expected, _TOLERANCE, _TOLERANCE, equal_nan=True
    )
