"""Stock `torch.nn` modules: which can be written as their own constructor call, and how."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# What a class may have of its own and still run as the one that it inherits from.
_SAYS_NOTHING_OF_FORWARD = {
    *("__init__", "reset_parameters", "__module__", "__qualname__", "__doc__", "__annotations__"),
    *("__firstlineno__", "__static_attributes__"),  # from Python 3.13 on
}


@dataclass(frozen=True, slots=True)
class StockModule:
    """A class of `torch.nn` and the arguments that rebuild a module of it.

    `arguments` are all that it was built with; only those in `needed` differ from the defaults.
    """

    kind: type[nn.Module]
    arguments: Mapping[str, Any]
    needed: frozenset[str]

    def __str__(self) -> str:
        return _expression(self.kind, {k: v for k, v in self.arguments.items() if k in self.needed})


def stock_module(module: nn.Module) -> StockModule | None:
    """How `module` is rebuilt but for its values.

    None unless the class is one of `torch.nn`, or has but a constructor of its own, without hooks
    or changed methods, and the expression, evaluated on the meta device, gives a module with the
    same state and settings.
    """
    kind = _class_of_torch(type(module))
    if kind is None:
        return None
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return None
    arguments = _arguments(module, kind)
    if arguments is None or not _rebuilds(_expression(kind, arguments), module):
        return None
    for name, value in arguments.items():
        if isinstance(value, tuple | list) and len(set(value)) == 1:
            shorter = {**arguments, name: value[0]}
            if _rebuilds(_expression(kind, shorter), module):
                arguments = shorter
    needed = dict(arguments)
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in arguments and parameter.default is not inspect.Parameter.empty:
            fewer = {key: value for key, value in needed.items() if key != name}
            if _rebuilds(_expression(kind, fewer), module):
                needed = fewer
    return StockModule(kind, arguments, frozenset(needed))


def constructor(module: nn.Module) -> str | None:
    """The expression that rebuilds a stock module: `nn.Conv2d(3, 64, 3, padding=1)`."""
    found = stock_module(module)
    return None if found is None else str(found)


def forward_takes_one(module: nn.Module) -> bool:
    """Whether `forward` has one parameter, so that a call can only be `module(x)`."""
    return len(inspect.signature(type(module).forward).parameters) == 2


def _class_of_torch(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class of `torch.nn` that `kind` is, or is but for how it is made."""
    for base in kind.__mro__:
        if base.__module__.startswith("torch.nn.modules."):
            public = getattr(nn, base.__name__, None) is base
            return base if public and base is not nn.Module else None
        if not _SAYS_NOTHING_OF_FORWARD.issuperset(vars(base)):
            return None
    return None


def _arguments(module: nn.Module, kind: type[nn.Module]) -> dict[str, Any] | None:
    """Constructor arguments read back from the attributes that torch.nn keeps under their names."""
    found: dict[str, Any] = {}
    if kind.__init__ is nn.Module.__init__:
        return found
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return None
        if name == "device" or name.startswith("_"):
            continue
        if name == "dtype":
            dtypes = {p.dtype for p in module.parameters()}
            if len(dtypes) == 1 and dtypes != {torch.float32}:
                found[name] = dtypes.pop()
        elif name == "bias":
            found[name] = getattr(module, "bias", None) is not None
        elif hasattr(module, name):
            found[name] = getattr(module, name)
        elif parameter.default is inspect.Parameter.empty:
            return None
    plain = (int, float, bool, str, tuple, list, type(None), torch.dtype)
    return found if all(isinstance(value, plain) for value in found.values()) else None


def _expression(kind: type[nn.Module], arguments: dict[str, Any]) -> str:
    """The call, required arguments by position, and the first one too where it reads well."""
    parts = []
    for place, (name, parameter) in enumerate(inspect.signature(kind).parameters.items()):
        if name not in arguments:
            continue
        value = arguments[name]
        required = parameter.default is inspect.Parameter.empty
        by_position = required or (place == 0 and name != "dim" and type(value) in (int, float))
        parts.append(repr(value) if by_position else f"{name}={value!r}")
    return f"nn.{kind.__name__}({', '.join(parts)})"


def _rebuilds(expression: str, module: nn.Module) -> bool:
    try:
        with torch.device("meta"):
            rebuilt = eval(expression, {"nn": nn, "torch": torch})
    except (TypeError, ValueError, NameError, SyntaxError):
        return False
    return _settings(rebuilt) == _settings(module) and _state(rebuilt) == _state(module)


def _settings(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if name != "training" and not name.startswith("_") and isinstance(value, int | float | str)
    } | {"repr": module.extra_repr()}


def _state(module: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor.shape, tensor.dtype) for name, tensor in named]
