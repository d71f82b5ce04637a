"""What the user calls the model with: bound to forward's parameters, flat, cut to other batches."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.runtime.structure import Structure, describe, leaves


def flat_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a call in the order of `Capture.inputs`."""
    return describe(bind(model, args, kwargs)[1])[1]


def bind(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of forward's parameters and those that are given, by name."""
    parameters = inspect.signature(model.forward).parameters.values()
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(str(parameter) for parameter in parameters)
        raise InputError(
            f"the inputs don't fit {type(model).__name__}.forward({names}): {error}"
        ) from error
    given = dict(bound.arguments)
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL and given.pop(parameter.name, ()):
            raise InputError(
                f"forward takes *{parameter.name}: give each input a parameter of its own"
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(parameter.name, {}))
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return tuple(dict.fromkeys([*plain, *given])), given


def batch_of(tensors: Sequence[Tensor]) -> tuple[int, list[bool]]:
    """The rows of the first tensor that has any, and which tensors have as many."""
    rows = [len(tensor) for tensor in tensors if tensor.dim()]
    if not rows:
        raise InputError("no input is a tensor with a batch dimension: give at least one")
    return rows[0], [tensor.dim() > 0 and len(tensor) == rows[0] for tensor in tensors]


def with_rows(tensors: Sequence[Tensor], batched: Sequence[bool], rows: list[int]) -> list[Tensor]:
    """The same inputs with other rows of their batch."""
    return [
        tensor.detach()[rows].requires_grad_(tensor.requires_grad) if is_batched else tensor
        for tensor, is_batched in zip(tensors, batched, strict=True)
    ]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same inputs once more, since forward may write into them."""
    return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]


def input_names(structure: Structure) -> list[str]:
    """A name for each tensor of the inputs: its parameter's, with its place inside if nested."""
    return [re.sub(r"\W+", "_", path).strip("_") for path, _ in leaves(structure)]
