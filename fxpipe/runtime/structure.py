"""Nested inputs and outputs as JSON: which container each tensor sits in, and how to rebuild it.

A structure is one of
    {"tensor": 3}                              the fourth tensor
    {"constant": None}                         None, a bool, a number or a string
    {"tuple": [...]}, {"list": [...]}, {"dict": {"key": ...}}
    {"items": [[0, ...], [1, ...]]}            a dict with other keys than strings
    {"class": "package.module:Name", "fields": {"logits": ...}}
    {"object": "package.module:Name", "attributes": {"keys": ...}}
    {"dtype": "float32"}, {"type": "package.module:Name"}
    {"dtype": 3}, {"device": 3}                an object's note of what its fourth tensor has
    {"train": {"tuple": [...]}, "eval": {"tensor": 0}}    outputs that depend on the mode
where the class is a named tuple or a dataclass (which transformers' outputs are), made by calling
it, and the object any other with plain attributes (a cache of keys and values), made of them.
"""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import InputError

Structure = dict[str, Any]
_NAMED = ("class", "object", "type")


def describe(obj: object) -> tuple[Structure, list[Tensor]]:
    """The structure of `obj` and its tensors in order. Raises InputError for others."""
    tensors: list[Tensor] = []
    try:
        return _describe(obj, tensors), tensors
    except RecursionError:
        raise InputError(
            f"a {type(obj).__name__} that holds itself can't be passed through a pipeline"
        ) from None


def tensors_of(structure: Structure, obj: Any) -> list[Tensor]:
    """The tensors of `obj`, which must have `structure`. Raises InputError where it differs."""
    tensors: list[Tensor] = []
    _collect(structure, obj, "the input", tensors)
    return tensors


def tensors_at(structure: Structure, value: Any) -> list[Tensor]:
    """The tensors of `value` where `structure` has some; what else it holds is not looked at."""
    kind, inner = next(iter(structure.items()))
    if kind == "tensor":
        return [value]
    if kind in ("tuple", "list"):
        parts = [(child, value[k]) for k, child in enumerate(inner)]
    elif kind in ("dict", "items"):
        parts = [(child, value[key]) for key, child in dict(inner).items()]
    elif kind in ("class", "object"):
        fields = structure["fields" if kind == "class" else "attributes"]
        parts = [(child, getattr(value, name)) for name, child in fields.items()]
    else:
        return []
    return [tensor for child, part in parts for tensor in tensors_at(child, part)]


def rebuild(structure: Structure, tensors: Sequence[Any]) -> Any:
    """The object that `structure` describes, with `tensors` in their places.

    A class that can't be imported here becomes a SimpleNamespace with the same fields, so that a
    package gives its outputs where the model's library is not installed.
    """
    return assemble(imported(structure), tensors)


def imported(node: Any) -> Any:
    """The same structure with each class itself in the place of its name."""
    if isinstance(node, list):
        return [imported(child) for child in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _found(child) if key in _NAMED and isinstance(child, str) else imported(child)
        for key, child in node.items()
    }


def assemble(structure: Structure, tensors: Sequence[Any]) -> Any:
    """What `rebuild` gives, of a structure that is `imported`."""
    kind, inner = next(iter(structure.items()))
    if kind == "tensor":
        return tensors[inner]
    if kind in ("constant", "type"):
        return inner
    if kind == "tuple":
        return tuple(assemble(child, tensors) for child in inner)
    if kind == "list":
        return [assemble(child, tensors) for child in inner]
    if kind == "dict":
        return {key: assemble(child, tensors) for key, child in inner.items()}
    if kind == "items":
        return {key: assemble(child, tensors) for key, child in inner}
    if kind == "class":
        fields = structure["fields"].items()
        return inner(**{name: assemble(child, tensors) for name, child in fields})
    if kind == "object":
        made = inner.__new__(inner)
        for name, child in structure["attributes"].items():
            setattr(made, name, assemble(child, tensors))
        return made
    return getattr(torch, inner) if isinstance(inner, str) else getattr(tensors[inner], kind)


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
    if isinstance(node, Mapping) and all(isinstance(key, int) for key in node):
        return {"items": [[key, _describe(child, tensors)] for key, child in node.items()]}
    if isinstance(node, torch.dtype):
        return {"dtype": str(node).removeprefix("torch.")}
    if isinstance(node, type):
        return {"type": _path(node)}
    if _is_plain(node):
        return _describe_object(node, tensors)
    raise InputError(
        f"a value of type {type(node).__name__} can't be passed through a pipeline: use "
        "tensors, None, numbers, strings, and tuples, lists, dicts or objects of them"
    )


def _is_plain(node: object) -> bool:
    """Whether the attributes of `node` are all there is to it."""
    kind = type(node)
    return (
        hasattr(node, "__dict__")
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
        and not isinstance(node, nn.Module)
        and not callable(node)
    )


def _describe_object(node: object, tensors: list[Tensor]) -> Structure:
    """An object's note of a dtype or device is that of its own tensors, which may be others."""
    first = len(tensors)
    attributes: dict[str, Structure] = {}
    notes = {}
    for name, value in vars(node).items():
        if isinstance(value, torch.dtype | torch.device):
            notes[name] = value
        else:
            attributes[name] = _describe(value, tensors)
    for name, value in notes.items():
        kind = type(value).__name__
        same = [k for k in range(first, len(tensors)) if getattr(tensors[k], kind) == value]
        attributes[name] = {kind: same[0]} if same else _describe(value, tensors)
    return {"object": _path(type(node)), "attributes": attributes}


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
    elif kind in ("dict", "items"):
        items = dict(node[kind])
        if not isinstance(value, Mapping) or set(value) != set(items):
            keys = sorted(items)
            raise InputError(f"{where} must be a dict with keys {keys}, not {_short(value)}")
        for key, child in items.items():
            _collect(child, value[key], f"{where}[{key!r}]", tensors)
    elif kind in ("class", "object"):
        for name, child in node["fields" if kind == "class" else "attributes"].items():
            _collect(child, getattr(value, name, None), f"{where}.{name}", tensors)


def _class(node: object, fields: dict[str, Structure]) -> Structure:
    return {"class": _path(type(node)), "fields": fields}


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return SimpleNamespace
    return found


def _short(value: object) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
