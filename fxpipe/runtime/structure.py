"""Nested inputs and outputs as JSON: which container each tensor sits in, and how to rebuild it.

A structure is one of
    {"tensor": 3}                              the fourth tensor
    {"constant": None}                         None, a bool, a number or a string
    {"tuple": [...]}, {"list": [...]}, {"dict": {"key": ...}}
    {"class": "package.module:Name", "fields": {"logits": ...}}
where the class is a named tuple or a dataclass (which transformers' outputs are).
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from fxpipe.errors import InputError

Structure = dict[str, Any]


def describe(obj: object) -> tuple[Structure, list[Tensor]]:
    """The structure of `obj` and its tensors in order. Raises InputError for other classes."""
    tensors: list[Tensor] = []
    return _describe(obj, tensors), tensors


def tensors_of(structure: Structure, obj: Any) -> list[Tensor]:
    """The tensors of `obj`, which must have `structure`. Raises InputError where it differs."""
    tensors: list[Tensor] = []
    _collect(structure, obj, "the input", tensors)
    return tensors


def rebuild(structure: Structure, tensors: Sequence[Any]) -> Any:
    """The object that `structure` describes, with `tensors` in their places.

    A class that can't be imported here becomes a SimpleNamespace with the same fields, so that a
    package gives its outputs where the model's library is not installed.
    """
    kind = next(iter(structure))
    if kind == "tensor":
        return tensors[structure["tensor"]]
    if kind == "constant":
        return structure["constant"]
    if kind == "tuple":
        return tuple(rebuild(child, tensors) for child in structure["tuple"])
    if kind == "list":
        return [rebuild(child, tensors) for child in structure["list"]]
    if kind == "dict":
        return {key: rebuild(child, tensors) for key, child in structure["dict"].items()}
    fields = {name: rebuild(child, tensors) for name, child in structure["fields"].items()}
    return _constructor(structure["class"])(**fields)


# Not functions within the above: one that calls itself is a cycle, and would keep the tensors alive
# until the garbage collector comes.
def _describe(node: object, tensors: list[Tensor]) -> Structure:
    if isinstance(node, Tensor):
        tensors.append(node)
        return {"tensor": len(tensors) - 1}
    if node is None or isinstance(node, bool | int | float | str):
        return {"constant": node}
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [f.name for f in dataclasses.fields(node)]
        return _class(node, {name: _describe(getattr(node, name), tensors) for name in names})
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        fields = {name: _describe(getattr(node, name), tensors) for name in node._fields}
        return _class(node, fields)
    if isinstance(node, tuple):
        return {"tuple": [_describe(child, tensors) for child in node]}
    if isinstance(node, list):
        return {"list": [_describe(child, tensors) for child in node]}
    if isinstance(node, Mapping) and all(isinstance(key, str) for key in node):
        return {"dict": {key: _describe(child, tensors) for key, child in node.items()}}
    raise InputError(
        f"a value of type {type(node).__name__} can't be passed through a pipeline: use "
        "tensors, None, numbers, strings, and tuples, lists, dicts or dataclasses of them"
    )


def _collect(node: Structure, value: Any, where: str, tensors: list[Tensor]) -> None:
    kind = next(iter(node))
    if kind == "tensor":
        if not isinstance(value, Tensor):
            raise InputError(
                f"{where} must be a tensor, as when the pipeline was compiled, not {value!r}"
            )
        tensors.append(value)
    elif kind == "constant":
        if isinstance(value, Tensor) or value != node["constant"]:
            raise InputError(
                f"{where} was {node['constant']!r} when the pipeline was compiled and is built "
                f"into it; it can't be {_short(value)} now: compile again with that value"
            )
    elif kind in ("tuple", "list"):
        if not isinstance(value, Sequence) or len(value) != len(node[kind]):
            raise InputError(f"{where} must be a {kind} of {len(node[kind])}, not {_short(value)}")
        for k, (child, item) in enumerate(zip(node[kind], value, strict=True)):
            _collect(child, item, f"{where}[{k}]", tensors)
    elif kind == "dict":
        if not isinstance(value, Mapping) or set(value) != set(node["dict"]):
            keys = sorted(node["dict"])
            raise InputError(f"{where} must be a dict with keys {keys}, not {_short(value)}")
        for key, child in node["dict"].items():
            _collect(child, value[key], f"{where}[{key!r}]", tensors)
    else:
        for name, child in node["fields"].items():
            _collect(child, getattr(value, name, None), f"{where}.{name}", tensors)


def _class(node: object, fields: dict[str, Structure]) -> Structure:
    return {"class": f"{type(node).__module__}:{type(node).__qualname__}", "fields": fields}


def _constructor(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return SimpleNamespace
    return found  # type: ignore[no-any-return]


def _short(value: object) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
