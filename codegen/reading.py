"""What the line of an op names."""

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from fxpipe.codegen.loops import item_of
from fxpipe.ops.regions import PLAIN, REGION


def items_of(node: fx.Node, following: Sequence[fx.Node]) -> list[fx.Node | None]:
    """The ops right behind `node` that unpack the tuple it makes, if nothing else reads it."""
    value = node.meta.get("val")
    if not isinstance(value, tuple | list) or len(value) < 2:
        return []
    items: list[fx.Node | None] = [None] * len(value)
    unpacking = sum(user.target is not item_of for user in node.users)
    for item in following[:unpacking]:
        if item.target is not operator.getitem or item.args[0] is not node:
            return []
        if not isinstance(item.args[1], int) or items[item.args[1]] is not None:
            return []
        items[item.args[1]] = item
    return items if len(following) >= unpacking > 0 else []


def names_device(node: fx.Node) -> bool:
    """Whether the line of `node` names the stage's device."""
    found: list[object] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    opens_autocast = any(each.here for each in node.meta.get(REGION, PLAIN).autocasts)
    return opens_autocast or any(isinstance(value, torch.device) for value in found)


def reads(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments of `node` that are values, each as often as it stands there."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return iter(found)


def paths(node: fx.Node) -> list[str]:
    """The module paths and state names that `node` uses."""
    names = [str(used.target) for used in reads(node) if used.op == "get_attr"]
    return [*names, str(node.target)] if node.op == "call_module" else names
