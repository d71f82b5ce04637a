"""What modules hold: their attributes, and what is in lists, dicts and objects of their own.

A forward may keep there what a later call reads, of which a `state_dict` knows nothing.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_Space = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
_KINDS = (OrderedDict, dict, list, set, deque)
_DEEPEST = 8  # containers in one another


class Attribute(NamedTuple):
    """Of a module: its name from the root on, and where the module's class comes from.

    Objects of classes that come from there too are looked into.
    """

    name: str
    value: object
    package: str


class Contents:
    """What was held as this was made: attributes, hooks, and all that containers hold."""

    def __init__(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Tensors of `state` are remembered elsewhere."""
        self._known = {id(tensor) for tensor in state.values()}
        self._spaces: list[tuple[_Space, list[Any]]] = []
        self._values: list[tuple[Tensor, Tensor]] = []
        own = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                spaces = vars(module), *(vars(module)[name] for name in own)
                self._spaces += [(space, _flat(space)) for space in spaces]
        for attribute in attributes(model):
            self._note(attribute.value, attribute.package, 0)

    def put_back(self) -> None:
        """Let all be held again that was."""
        for space, before in self._spaces:
            if [*map(id, _flat(space))] != [*map(id, before)]:
                _fill(space, before)
        for tensor, value in self._values:
            restore(tensor, value)

    def _note(self, value: object, package: str, depth: int) -> None:
        if id(value) in self._known or depth > _DEEPEST:
            return
        if isinstance(value, Tensor):
            self._known.add(id(value))
            if depth and not isinstance(value, nn.Parameter) and not value.is_inference():
                self._values.append((value, value.detach().clone()))
            return
        space = _space(value, package)
        if space is not None:
            self._known.add(id(value))
            self._spaces.append((space, _flat(space)))
        for item in _items(value, package):
            self._note(item, package, depth + 1)


def attributes(model: nn.Module) -> Iterator[Attribute]:
    """Those of all modules but nn.Module's own, and the containers of their classes."""
    own = vars(nn.Module())
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in vars(module).items():
            if name not in own:
                yield Attribute(prefix + name, value, _package(type(module)))
        for kind in type(module).__mro__:
            if _package(kind) not in ("torch", "builtins"):
                for name, value in vars(kind).items():
                    if isinstance(value, _KINDS):
                        yield Attribute(prefix + name, value, _package(kind))


def mark(value: object, package: str, within: tuple[set[int], int] | None = None) -> object:
    """Something by which it is seen that another value is held, however deep.

    Tensors in a container are told apart; of an attribute that is a tensor nothing is seen.
    `within` says what has been looked into already, and how deep this is.
    """
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and within is not None:
        return id(value)
    known, depth = within or (set(), 0)
    if id(value) in known or depth > _DEEPEST:
        return type(value)
    known.add(id(value))
    items = (mark(item, package, (known, depth + 1)) for item in _items(value, package))
    return type(value), tuple(items)


def restore(tensor: Tensor, value: Tensor) -> None:
    """Write into `tensor` what it had, if need be with the size that it had."""
    if tensor.shape != value.shape:
        tensor.data = value
    elif all(size < 2 or step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        tensor.data.copy_(value)
    # Else it is expanded, and torch writes into no such tensor.


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _space(value: object, package: str) -> _Space | None:
    """Where what it holds can be changed: the value itself, or the attributes of an object."""
    if isinstance(value, _KINDS):
        return value
    kind = type(value)
    looked_into = kind is SimpleNamespace or _package(kind) == package
    if not looked_into or isinstance(value, nn.Module | Tensor | type):
        return None
    return getattr(value, "__dict__", None)


def _items(value: object, package: str) -> list[Any]:
    """What it holds, the keys of a dict too."""
    if isinstance(value, tuple):
        return [*tuple.__iter__(value)]
    space = _space(value, package)
    return [] if space is None else _flat(space)


def _kind(space: _Space) -> Any:
    """The built-in kind, by whose methods it is read and written: a subclass may have others."""
    return next(kind for kind in _KINDS if isinstance(space, kind))


def _flat(space: _Space) -> list[Any]:
    """Its items."""
    kind = _kind(space)
    if isinstance(space, dict):
        return [one for pair in kind.items(space) for one in pair]
    return [*kind.__iter__(space)]


def _fill(space: _Space, items: list[Any]) -> None:
    """Let it hold these."""
    kind = _kind(space)
    kind.clear(space)
    if isinstance(space, dict):
        kind.update(space, zip(items[::2], items[1::2], strict=True))
    elif isinstance(space, set):
        kind.update(space, items)
    else:
        kind.extend(space, items)
