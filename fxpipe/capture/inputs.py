"""What the user calls the model with: bound to forward's parameters, flat, cut to other batches."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.runtime.leaves import leaves
from fxpipe.runtime.structure import Structure, describe


@dataclass(frozen=True, slots=True)
class Form:
    """How forward is called: `signature` names its parameters, one like `*images` among them.

    Those in `positional` are given by position, and after them those in `rest`, if there is one.
    """

    signature: tuple[str, ...]
    positional: tuple[str, ...]
    rest: str | None

    def call(self, model: nn.Module, given: Mapping[str, Any]) -> Any:
        """Forward's result on the inputs `given` by name."""
        args = [given[name] for name in self.positional]
        if self.rest is not None:
            args += given[self.rest]
        named = {k: v for k, v in given.items() if k not in self.positional and k != self.rest}
        return model(*args, **named)


def flat_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a call in the order of `Capture.inputs`."""
    return describe(bind(model, args, kwargs)[1])[1]


def bind(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Form, dict[str, Any]]:
    """How forward is called, and the inputs that are given, by name."""
    if not isinstance(args, tuple | list):
        raise InputError(
            f"the inputs by place are one {type(args).__name__}: give a tuple of them, as (x,), "
            "and inputs by name as a dict behind it"
        )
    parameters = inspect.signature(model.forward).parameters.values()
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(str(parameter) for parameter in parameters)
        raise InputError(
            f"the inputs don't fit {type(model).__name__}.forward({names}): {error}"
        ) from error
    given = dict(bound.arguments)
    rest = next(
        (p.name for p in parameters if p.kind is p.VAR_POSITIONAL and p.name in given), None
    )
    signature: list[str] = []
    positional: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            more = given.pop(parameter.name, {})
            given.update(more)
            signature += more
        elif parameter.kind is parameter.VAR_POSITIONAL:
            signature += [f"*{parameter.name}"] if rest else []
        else:
            signature.append(parameter.name)
            placed = parameter.kind is parameter.POSITIONAL_ONLY or (
                rest and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            )
            if placed and parameter.name in given:
                positional.append(parameter.name)
    return Form(tuple(signature), tuple(positional), rest), given


def _refuse_not_dense(tensors: Sequence[Tensor]) -> None:
    """Raise InputError for a tensor that can't be cut along its first dimension."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise InputError(
                f"an input is a {kind} tensor, and micro-batches are cut from dense ones: give "
                "its parts (indices and values, or padded rows and their lengths) instead"
            )


def batch_of(tensors: Sequence[Tensor]) -> tuple[int, list[bool]]:
    """The rows of the first tensor that has more than one, and which tensors have as many.

    Raises InputError for tensors that have none.
    """
    _refuse_not_dense(tensors)
    rows = [len(tensor) for tensor in tensors if tensor.dim()]
    if not rows:
        raise InputError("no input is a tensor with a batch dimension: give at least one")
    batch = next((n for n in rows if n > 1), 1)
    return batch, [tensor.dim() > 0 and len(tensor) == batch for tensor in tensors]


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
