"""Whose gradients come in the layout of the value that they are of.

A layer that gets one in another layout may keep a copy too. Each op was measured by itself, so it
is told here, from the last op to the first, what its readers send back to it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from fxpipe.costs.op_backward import gradients_of, ones, trained, with_gradient


@dataclass(frozen=True, slots=True)
class Layouts:
    """Of each tensor that an op is given: whether its gradient has its own layout.

    `kept`: if those of the op's results have theirs; `made`: also if they have not.
    """

    kept: tuple[bool, ...]
    made: tuple[bool, ...]


def layouts_of(result: Any, leaves: Sequence[Tensor], in_part: bool, writes: bool) -> Layouts:
    """Of an op that gave `result` for `leaves`; if it `writes` some of them, nothing is known.

    Gradients in another layout are tried on what is halved, `in_part`, only.
    """
    made = tuple(not leaf.requires_grad for leaf in leaves)
    if writes:
        return Layouts(made, made)
    kept = _own(result, leaves, turned=False)
    if in_part:
        still = _own(result, leaves, turned=True)
        made = tuple(a and b for a, b in zip(kept, still, strict=True))
    return Layouts(kept, made)


def _own(result: Any, leaves: Sequence[Tensor], turned: bool) -> tuple[bool, ...]:
    """Of each of `leaves`, whether its gradient comes in its layout, if it gets one."""
    made, wanted = with_gradient(result), trained(leaves)
    if not made or not wanted:
        return (True,) * len(leaves)
    found = iter(gradients_of(made, wanted, ones(made, turned)))
    return tuple(not leaf.requires_grad or _alike(next(found), leaf) for leaf in leaves)


def _alike(gradient: Tensor | None, leaf: Tensor) -> bool:
    return gradient is None or gradient.stride() == leaf.stride()


def in_own_layout(
    layouts: Mapping[fx.Node, Layouts], given: Callable[[fx.Node], Sequence[fx.Node]]
) -> set[fx.Node]:
    """Ops of which the result's gradient surely comes in the result's layout.

    `layouts` has them in the order of the graph; `given` tells which node each tensor is from that
    an op is given. Of the model's outputs nothing is known.
    """
    found: set[fx.Node] = set()

    def sends_own(reader: fx.Node, node: fx.Node) -> bool:
        if reader not in layouts:
            return False
        told = layouts[reader].kept if reader in found else layouts[reader].made
        return all(own for one, own in zip(given(reader), told, strict=True) if one is node)

    for node in reversed(list(layouts)):
        if node.users and all(sends_own(reader, node) for reader in node.users):
            found.add(node)
    return found
