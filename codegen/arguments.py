"""Names for what differs between instances of a class: as the user's own class has them."""

import inspect
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fxpipe.codegen.names import base_name
from fxpipe.codegen.parts import Part, Slot
from fxpipe.codegen.wording import argument_words
from fxpipe.ops.constants import same

Column = tuple[Any, ...]


def setting_names(
    numbers: Mapping[Column, Sequence[Slot]], taken: set[str], modules: Sequence[nn.Module]
) -> dict[Column, str]:
    """A constructor argument for each number, by its values in all of `modules`.

    It is called as the user's class calls an argument or attribute that has these values, else as
    the module or function that takes the number calls it.
    """
    signature = _parameters(type(modules[0]).__init__)
    attributes = [*signature, *(name for name in vars(modules[0]) if name not in signature)]
    names: dict[Column, str] = {}
    for column, slots in numbers.items():
        own = [name for name in attributes if _has(modules, name, column)]
        candidates = [*own, *_told(slots)]
        names[column] = _free(candidates, {*taken, *names.values(), *dir(nn.Module)})
    order = {name: place for place, name in enumerate(signature)}
    return dict(sorted(names.items(), key=lambda item: order.get(item[1], len(order))))


def input_names(
    parts: Sequence[Part], module: nn.Module, formals: Mapping[str, Mapping[str, Sequence[str]]]
) -> dict[Column, str]:
    """A parameter of forward for each value from outside, by what it is in all of `parts`.

    It is called as the parameter of the user's forward that it is given as; `formals` say which, by
    value and call. What is given in another way is called as outside.
    """
    columns = dict.fromkeys(
        tuple(part.slots[place].content for part in parts)
        for place, slot in enumerate(parts[0].slots)
        if slot.is_value
    )
    names: dict[Column, str] = {}
    for column in columns:
        given = [_given_as(v, formals, part.call) for v, part in zip(column, parts, strict=True)]
        known = [set(one) for one in given if one]
        own = [name for one in given for name in one if all(name in other for other in known)]
        names[column] = _free([*own, _own_name(column[0])], {"self", *names.values()})
    order = {name: place for place, name in enumerate(_parameters(type(module).forward))}
    return dict(sorted(names.items(), key=lambda item: order.get(item[1], len(order))))


def _given_as(
    value: Any, formals: Mapping[str, Mapping[str, Sequence[str]]], call: str
) -> Sequence[str]:
    """The parameters as which `call` is given a value, or the list that several are in."""
    if not isinstance(value, tuple):
        own = formals.get(value.name, {}).get(call, ())
        return [name for name in own if not name.startswith("*")]
    first, *others = (formals.get(one.name, {}).get(call, ()) for one in value)
    return [name[1:] for name in first if name[0] == "*" and all(name in other for other in others)]


def _own_name(value: Any) -> str:
    """The name of a value outside of the class."""
    if isinstance(value, tuple):
        return "tensors"
    named = str(value.target).rpartition(".")[2] if value.op == "get_attr" else value.name
    return base_name(named)


def _parameters(function: Any) -> list[str]:
    """The names that a call may give, `self` left out."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return []
    return [p.name for p in parameters if p.kind in named and p.name != "self"]


def _has(modules: Sequence[nn.Module], name: str, column: Column) -> bool:
    values = [vars(module).get(name) for module in modules]
    return all(same(a, b) for a, b in zip(values, column, strict=True))


def _told(slots: Sequence[Slot]) -> list[str]:
    """What the user's lines call a number, else what its takers call it, alone and by theirs."""
    words = [_word(slot) for slot in slots if slot.within]
    plain = [slot.name for slot in slots if slot.name]
    long = [f"{_within(slot.module)}_{slot.name}" for slot in slots if slot.name]
    return [*(word for word in words if word), *plain, *long, "number"]


def _within(module: str) -> str:
    """The end of a module's path that is a name: `net_2` of `ff.net.2`."""
    parts = module.split(".")
    start = max((k for k, part in enumerate(parts) if not part.isdecimal()), default=0)
    return "_".join(parts[start:])


def _word(slot: Slot) -> str:
    words = argument_words(slot.node) if slot.node is not None else []
    return words[slot.place].lower() if slot.place < len(words) else ""


def _free(candidates: Sequence[str], taken: set[str]) -> str:
    usable = [
        n for n in candidates if n.isidentifier() and n.isascii() and not keyword.iskeyword(n)
    ]
    for name in usable:
        if name not in taken and not name.startswith("_"):
            return name
    base = (usable or ["value"])[0].strip("_") or "value"
    number = 2
    while f"{base}_{number}" in taken:
        number += 1
    return f"{base}_{number}"
