"""Torch's own layers that draw random numbers, as dropout does, under the draws of a block.

To look at each function that a forward calls costs more than many of them take. Where layers alone
draw, hooks on these are all it needs.
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from fxpipe.runtime.drawing import Draws


class _Block(threading.local):
    """What this thread runs: the draws, and the layers that draw from them."""

    draws: "Draws | None" = None
    layers: Collection[nn.Module] = ()


_BLOCK = _Block()


@contextmanager
def layers_draw(draws: "Draws | None", layers: Collection[nn.Module]) -> Iterator[None]:
    """Let these layers of torch's draw from `draws`, if any, while the block runs."""
    for layer in layers:
        if _begin not in layer._forward_pre_hooks.values():  # a copy has its hooks already
            layer.register_forward_pre_hook(_begin)
            layer.register_forward_hook(_finish, always_call=True)
    before = _BLOCK.draws, _BLOCK.layers
    _BLOCK.draws, _BLOCK.layers = draws, layers
    try:
        yield
    finally:
        _BLOCK.draws, _BLOCK.layers = before


def _begin(layer: nn.Module, _: object) -> None:
    if _BLOCK.draws is not None and layer in _BLOCK.layers:
        _BLOCK.draws.begin()


def _finish(layer: nn.Module, _: object, _output: object) -> None:
    # Also called if another hook failed before it began.
    if _BLOCK.draws is not None and _BLOCK.draws.begun and layer in _BLOCK.layers:
        _BLOCK.draws.finish()


class Entered:
    """Tells which of torch's own layers a forward of `module` is in."""

    def __init__(self, module: nn.Module | None) -> None:
        self._layers = [] if module is None else [m for m in module.modules() if _is_own_layer(m)]
        self._within: list[nn.Module] = []

    @property
    def layer(self) -> nn.Module | None:
        """The one it is in now."""
        return self._within[-1] if self._within else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The forward is the block's."""
        hooks = []
        for layer in self._layers:
            hooks += [
                layer.register_forward_pre_hook(lambda m, _: self._within.append(m)),
                layer.register_forward_hook(self._leave, always_call=True),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _leave(self, *_: object) -> None:
        self._within.pop()


def _is_own_layer(module: nn.Module) -> bool:
    """Whether it is a layer of torch's, which draws where its input is, and nothing within one."""
    return type(module).__module__.startswith("torch.nn.") and not any(module.children())
