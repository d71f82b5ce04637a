"""Calls of an nn.Sequential as one node."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx, nn

from fxpipe.codegen.loops import LOOP
from fxpipe.codegen.made import Made, dtypes_within, made_of_stock


def called_in_turn(
    path: str,
    module: nn.Module,
    nodes: Sequence[fx.Node],
    made: Mapping[str, Made],
    wanted: Collection[str],
) -> tuple[tuple[str, Made], ...] | None:
    """The modules by name that `nodes` call one after the other, as nn.Sequential itself does.

    None if that is not all that the call of `module` at `path` does: if a value between is `wanted`
    elsewhere, too.
    """
    if type(module).forward is not nn.Sequential.forward:
        return None
    chain: list[tuple[str, Made]] = []
    before: fx.Node | None = None
    waiting = iter(nodes)
    for name, child in module._modules.items():
        if type(child) is nn.Identity:
            chain.append((name, made_of_stock(child)))
            continue
        node = next(waiting, None)
        if node is None or node.target != f"{path}.{name}" or LOOP in node.meta:
            return None
        if len(node.args) != 1 or node.kwargs or before not in (None, node.args[0]):
            return None
        if before is not None and (len(before.users) > 1 or before.name in wanted):
            return None
        chain.append((name, made[str(node.target)]))
        before = node
    if before is None or next(waiting, None) is not None:
        return None
    return tuple(chain)


def joined(path: str, nodes: Sequence[fx.Node], meta: dict[str, Any]) -> fx.Node:
    """The last of `nodes`, which calls the module at `path` in place of all of them."""
    last = nodes[-1]
    last.args, last.target = nodes[0].args, path
    last.meta = {**last.meta, **meta}
    for node in reversed(nodes[:-1]):
        node.graph.erase_node(node)
    return last


def made_of_chain(chain: Sequence[tuple[str, Made]]) -> Made:
    """An nn.Sequential of these modules."""
    return Made(
        "nn.Sequential",
        {},
        frozenset(),
        nn.Sequential,
        chain=tuple(chain),
        dtypes=dtypes_within(chain),
    )
