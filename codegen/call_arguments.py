"""The arguments of a call as a person gives them: none that says what holds anyway."""

import inspect
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from fxpipe.ops.constants import same

# Methods that take a shape as one tuple or as so many numbers.
_OF_A_SHAPE = ("view", "reshape", "expand", "permute", "repeat", "tile")


def told_arguments(node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a function: tensors by place, settings by name, defaults left out."""
    target: Any = node.target
    args, kwargs = list(node.args), dict(node.kwargs)
    if not inspect.isfunction(target):
        return _without_last(_name(node), args), without_defaults(node)
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except ValueError:
        return args, kwargs
    kinds = {parameter.kind for parameter in parameters[: len(args)]}
    if kinds - {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        return args, kwargs
    by_name = {p.name: value for p, value in zip(parameters, args, strict=False)} | kwargs
    placed: list[Any] = []
    for parameter in parameters:
        value = by_name.get(parameter.name)
        if not (isinstance(value, fx.Node | list | tuple) or parameter.default is parameter.empty):
            break
        if parameter.name not in by_name or parameter.kind is parameter.KEYWORD_ONLY:
            break
        placed.append(by_name.pop(parameter.name))
    return placed, _without(by_name, {p.name: p.default for p in parameters})


def without_defaults(node: fx.Node) -> dict[str, Any]:
    """The keyword arguments of a method or a built-in function, but for those given anyway."""
    return _without(node.kwargs, _schema_defaults(_name(node)) if node.kwargs else {})


def _name(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.lstrip("_")


def _without_last(name: str, args: list[Any]) -> list[Any]:
    """The arguments of a built-in function by place, but for the last that are given anyway."""
    names, defaults = _schema_names(name), _schema_defaults(name)
    kept = len(args)
    while 0 < kept <= len(names) and names[kept - 1] in defaults:
        last = [*args[kept - 1]] if isinstance(args[kept - 1], tuple) else args[kept - 1]
        if isinstance(last, fx.Node) or not same(last, defaults[names[kept - 1]]):
            break
        kept -= 1
    return args[:kept]


def spread(node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    """`x.view(batch, -1)` for `x.view((batch, -1))`."""
    if node.target in _OF_A_SHAPE and len(args) == 1 and isinstance(args[0], tuple | list):
        return args[0] or args
    return args


def _without(given: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, fx.Node) or name not in defaults or not same(value, defaults[name])
    }


@cache
def _schema_names(name: str) -> list[str]:
    """The arguments of an op of torch in order, if all its overloads begin with them."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [
        [argument.name for argument in getattr(packet, overload)._schema.arguments]
        for overload in (packet.overloads() if packet is not None else ())
    ]
    alike = takewhile(lambda names: len({*names}) == 1, zip(*overloads, strict=False))
    return [names[0] for names in alike]


@cache
def _schema_defaults(name: str) -> dict[str, Any]:
    """Defaults of an op of torch, by argument, as far as all its overloads have the same."""
    packet = getattr(torch.ops.aten, name, None)
    found: dict[str, list[Any]] = {}
    for overload in packet.overloads() if packet is not None else ():
        for argument in getattr(packet, overload)._schema.arguments:
            known = argument.default_value if argument.has_default_value() else inspect.Parameter
            found.setdefault(argument.name, []).append(known)
    return {
        argument: values[0]
        for argument, values in found.items()
        if all(same(value, values[0]) for value in values)
    }
