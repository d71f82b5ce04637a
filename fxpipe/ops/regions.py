"""Under which settings an op runs: known of each op, so that a cut may part two.

They are grad mode, autocast, and which kernels attention may take.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.nn import attention
from torch.nn.attention import sdpa_kernel

from fxpipe.runtime.attention import backends, kernels_in_order

REGION = "region"  # key of a node's meta


@dataclass(frozen=True, slots=True)
class Autocast:
    """One `torch.autocast`, of the device that the model was on, which is `here`, or of another."""

    device_type: str
    dtype: torch.dtype | None
    enabled: bool
    cache: bool | None
    here: bool


@dataclass(frozen=True, slots=True)
class Kernels:
    """Those that `torch.nn.attention.sdpa_kernel` lets attention take; the first if `in_order`."""

    names: tuple[str, ...]
    in_order: bool


@dataclass(frozen=True, slots=True)
class Region:
    """What is switched on around an op: gradients, and autocasts from the outermost in.

    Attention takes one of these kernels; None leaves that as it is.
    """

    grad: bool = True
    autocasts: tuple[Autocast, ...] = ()
    kernels: Kernels | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run a block under these settings."""
        with ExitStack() as stack:
            if not self.grad:
                stack.enter_context(torch.no_grad())
            for each in self.autocasts:
                stack.enter_context(
                    torch.autocast(each.device_type, each.dtype, each.enabled, each.cache)
                )
            if self.kernels is not None:
                allowed, in_order = backends(self.kernels.names), self.kernels.in_order
                stack.enter_context(sdpa_kernel(allowed, set_priority=in_order))
            yield


PLAIN = Region()


def behind(node: fx.Node, region: Region, device: torch.device) -> Region | None:
    """The region behind `node`, which stands in `region`, if all that it does is to switch.

    The model is on `device`.

    Inference mode is no grad: its tensors could go to no stage that computes gradients.
    """
    arguments: tuple[Any, ...] = node.args
    if node.target is torch.autograd.grad_mode._enter_inference_mode:
        node.meta[REGION] = region
        return replace(region, grad=not arguments[0])
    if node.target is torch.autograd.grad_mode._exit_inference_mode:
        return replace(region, grad=arguments[0].meta[REGION].grad)
    if node.target is torch._C._set_grad_enabled:
        return replace(region, grad=bool(arguments[0]))
    if node.target is torch.amp.autocast_mode._enter_autocast:
        kind, dtype, enabled, cache = arguments
        entered = Autocast(kind, dtype, enabled, cache, here=kind == device.type)
        return replace(region, autocasts=(*region.autocasts, entered))
    if node.target is torch.amp.autocast_mode._exit_autocast:
        return replace(region, autocasts=region.autocasts[:-1])
    if node.target is attention._backend_from_string:  # an argument of the next
        return region
    if node.target is attention._sdpa_kernel:
        named, in_order = arguments
        names, usual = tuple(one.args[0] for one in named), kernels_in_order()
        # What is set where nothing is said is what a block leaves behind.
        same = names == usual if in_order else {*names} == {*usual}
        chosen = Kernels(names, in_order and len(names) > 1)
        return replace(region, kernels=None if same else chosen)
    return None


class Switch:
    """Goes from one region to the next while ops are run in order; leaves the last at the end."""

    def __init__(self) -> None:
        self.region = PLAIN
        self._stack = ExitStack()

    def __enter__(self) -> "Switch":
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def to(self, region: Region) -> None:
        """Be in `region`."""
        if region != self.region:
            self._stack.close()
            self._stack.enter_context(region.entered())
            self.region = region


class GraphSwitch:
    """Writes into a graph what goes from one region to the next, as `behind` reads it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.region = PLAIN
        self._graph = graph
        self._entered: list[fx.Node] = []

    def to(self, region: Region) -> None:
        """What is added next to the graph stands in `region`."""
        if region == self.region:
            return
        call = self._graph.call_function
        while self._entered:
            call(torch.amp.autocast_mode._exit_autocast, (self._entered.pop(),))
        call(torch._C._set_grad_enabled, (region.grad,))
        for each in region.autocasts:
            arguments = (each.device_type, each.dtype, each.enabled, each.cache)
            self._entered.append(call(torch.amp.autocast_mode._enter_autocast, arguments))
        if region.kernels != self.region.kernels:
            chosen = region.kernels or Kernels(kernels_in_order(), in_order=True)
            named = [call(attention._backend_from_string, (name,)) for name in chosen.names]
            call(attention._sdpa_kernel, (named, chosen.in_order))
        self.region = region
