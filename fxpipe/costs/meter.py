"""What one op costs: how long it takes forward and backward, and what its backward keeps.

Ops with the same signature are run once. Backward is timed by itself, not guessed from forward by
one ratio for all ops (Pfeife, ICML 2025, does the latter).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from fxpipe.costs.layouts import Layouts, in_own_layout, layouts_of
from fxpipe.costs.of_weights import of_weights
from fxpipe.costs.op_backward import (
    arriving_bytes,
    backward_bytes,
    backward_ms,
    bytes_added_to,
    step_bytes,
    tensors,
    with_gradient,
    without_gradient,
)
from fxpipe.costs.reached import reached
from fxpipe.costs.saved import Owner, computed, owners
from fxpipe.costs.stopwatch import Clock
from fxpipe.ir import Capture, OpCost, own_storage
from fxpipe.ops.interpret import Compute
from fxpipe.runtime.receive import Slot, receive
from fxpipe.runtime.split import written_anyway
from fxpipe.runtime.swapping import swapped


@dataclass(frozen=True, slots=True)
class _Measured:
    """Costs of one signature.

    `saved` are the storages that backward keeps: an argument's, by its place among the tensors
    given, the result's own, or, None, one that nothing else has. `shapes_of` are places too.
    `arriving_bytes` if the results' gradients come in their layout, and the most in any.
    """

    forward_ms: float
    backward_ms: float
    weight_gradient_ms: float
    saved: tuple[tuple[Owner, int], ...]
    forward_bytes: int
    backward_bytes: int
    added_bytes: int
    freed_bytes: int
    arriving_bytes: int
    most_arriving_bytes: int
    layouts: Layouts
    shapes_of: tuple[int, ...]


class Meter:
    """A hook for `run_graph` that measures each op's costs, with the times that `clock` tells.

    The graph runs with `modules`. `engine_ms` is what a backward takes besides the op's own.
    """

    def __init__(
        self,
        capture: Capture,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        clock: Clock,
        engine_ms: float = 0.0,
    ) -> None:
        self._capture = capture
        self._modules = modules
        self._device = device
        self._clock = clock
        self._engine_ms = engine_ms
        self._known: dict[str, _Measured] = {}
        self._measured: dict[fx.Node, _Measured] = {}
        self._of_weights = of_weights(capture.graph)

    def __call__(
        self, node: fx.Node, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Measure the op if its signature is new, then compute it."""
        args, kwargs = tree_map(self._moved, (args, kwargs))
        if node.name in self._capture.ops:
            weights = [self._is_weight(leaf) for leaf, _ in _given(node)]
            key = f"{_signature(node, self._capture, (args, kwargs))} {weights}"
            if key not in self._known:
                self._known[key] = self._measure(node, compute, args, kwargs)
            self._measured[node] = self._known[key]
        with torch.no_grad():
            return compute(args, kwargs)

    @property
    def costs(self) -> dict[str, OpCost]:
        """Each op's, by its name; all of them have run."""
        layouts = {node: measured.layouts for node, measured in self._measured.items()}
        own = in_own_layout(layouts, lambda node: [used for used, _ in _given(node)])
        back = reached(self._capture)
        return {
            node.name: self._cost(node, measured, node in own, node in back)
            for node, measured in self._measured.items()
        }

    def _moved(self, value: Any) -> Any:
        return self._device if isinstance(value, torch.device) else value

    def _cost(
        self, node: fx.Node, measured: _Measured, own_layout: bool, goes_back: bool
    ) -> OpCost:
        """The costs, storages under the names of this op's values.

        With `own_layout` the results' gradients come in theirs. Unless it `goes_back` none come;
        what is saved counts all the same, as a stage may keep it until then.
        """
        given = _given(node)
        saved: dict[str, int] = {}
        for k, (place, n_bytes) in enumerate(measured.saved):
            if place is None:
                name = f"{node.name}/saved_{k}"
            else:
                name = self._storage(node if place == "result" else given[place][0])
            saved[name] = n_bytes
        own = {own_storage(name) for name in self._capture.state}
        kept = {name: n_bytes for name, n_bytes in saved.items() if name not in own}
        return OpCost(
            measured.forward_ms,
            measured.backward_ms if goes_back else 0.0,
            tuple(kept.items()),
            measured.forward_bytes,
            measured.weight_gradient_ms if goes_back else 0.0,
            measured.backward_bytes,
            measured.arriving_bytes if own_layout else measured.most_arriving_bytes,
            added_bytes=measured.added_bytes,
            freed_bytes=measured.freed_bytes,
            shapes_of=tuple(
                self._capture.first_name(str(given[place][0].target))
                for place in measured.shapes_of
            ),
        )

    def _is_weight(self, node: fx.Node) -> bool:
        return node.op == "get_attr" or node in self._of_weights

    def _storage(self, node: fx.Node) -> str:
        op = self._capture.ops.get(node.name)
        name = str(node.target)
        return op.storage if op else own_storage(name) if node.op == "get_attr" else name

    def _measure(
        self, node: fx.Node, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Measured:
        values = tensors((args, kwargs))
        trained = {
            id(value): requires_grad
            for (_, requires_grad), value in zip(_given(node), values, strict=True)
        }
        writes = bool(self._capture.ops[node.name].mutates)

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.detach().requires_grad_(trained[id(value)])

        def unwritten(value: Any) -> Any:
            return value.clone() if writes and isinstance(value, Tensor) else value

        def fresh() -> Any:
            return tree_map(unwritten, tree_map(leaf, (args, kwargs)))

        forward_ms = self._clock(lambda given: compute(*given), fresh)
        # A tensor that the op writes is its result then: gradients go on to the leaf.
        begun = tree_map(leaf, (args, kwargs))
        given = tree_map(unwritten, begun)
        result, forward_bytes, saved = computed(lambda: compute(*given), self._device)
        leaves, parameters = tensors(begun), self._parameters(node)
        pairs = list(zip(_given(node), leaves, strict=True))
        weights = [tensor for (used, _), tensor in pairs if self._is_weight(used)]
        read = [tensor for (used, _), tensor in pairs if used.op == "get_attr"]
        inputs = [tensor for (used, _), tensor in pairs if not self._is_weight(used)]
        unreached = without_gradient(result, read)
        whole_ms = self._backward_ms(result, leaves + parameters)
        in_step = self._step_bytes(node, compute, tree_map(leaf, (args, kwargs)), unwritten)
        made_bytes = backward_bytes(result, leaves + parameters, self._device)
        added_bytes = bytes_added_to(result, read + parameters)
        in_part = _wants(weights + parameters) and _wants(inputs)
        arriving = [
            arriving_bytes(result, inputs, turned) if in_part else 0 for turned in (False, True)
        ]
        return _Measured(
            forward_ms=forward_ms,
            backward_ms=whole_ms,
            weight_gradient_ms=whole_ms * self._weight_share(result, weights + parameters, inputs),
            saved=owners(saved, tensors(given), tensors(result), self._parameters(node)),
            forward_bytes=forward_bytes,
            backward_bytes=made_bytes,
            added_bytes=added_bytes,
            freed_bytes=max(0, made_bytes - added_bytes - in_step),
            arriving_bytes=arriving[0],
            most_arriving_bytes=max(arriving),
            layouts=layouts_of(result, leaves, in_part, writes),
            shapes_of=tuple(
                place
                for place, (_, tensor) in enumerate(pairs)
                if any(tensor is one for one in unreached)
            ),
        )

    def _step_bytes(
        self, node: fx.Node, compute: Compute, begun: Any, unwritten: Callable[[Any], Any]
    ) -> int:
        """What the backward takes in a step, of leaves with which nothing was computed yet."""
        module = self._modules[str(node.target)] if node.op == "call_module" else nn.Module()
        own = {
            name: p.detach().requires_grad_(p.requires_grad)
            for name, p in module.named_parameters()
        }
        read = [
            tensor
            for (used, _), tensor in zip(_given(node), tensors(begun), strict=True)
            if used.op == "get_attr"
        ]

        def entered(value: Any) -> Any:
            if any(value is one for one in read) or not _wants(tensors(value)):
                return value
            return receive({"": value}, {"": Slot()})[""]

        def run() -> Any:
            given = tree_map(unwritten, tree_map(entered, begun))
            with swapped(module, "_parameters", own):
                return compute(*given)

        return step_bytes(run, [*read, *own.values()], self._device)

    def _backward_ms(self, result: Any, leaves: Sequence[Tensor]) -> float:
        return max(0.0, backward_ms(self._clock, result, leaves) - self._engine_ms)

    def _weight_share(
        self, result: Any, weights: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> float:
        """What part of the backward is for weights alone; measured only where there is a choice.

        The halves together take longer than the whole, which does once what both need.
        """
        if not (_wants(weights) and _wants(inputs)):
            return float(_wants(weights))
        written = [
            tensor for made in with_gradient(result) for tensor in written_anyway(made.grad_fn)
        ]
        of_weights = self._backward_ms(result, [*weights, *written])
        of_inputs = self._backward_ms(result, inputs)
        return of_weights / (of_weights + of_inputs) if of_weights else 0.0

    def _parameters(self, node: fx.Node) -> list[Tensor]:
        if node.op != "call_module":
            return []
        module = self._modules[str(node.target)]
        return [*module.parameters(), *module.buffers()]


def _wants(tensors: Sequence[Tensor]) -> bool:
    """Whether some of them need a gradient."""
    return any(tensor.requires_grad for tensor in tensors)


def _given(node: fx.Node) -> list[tuple[fx.Node, bool]]:
    """The tensors among the arguments, in the order of `tensors` of their values.

    Each as the node that computes it (or the tuple it is in) and whether it needs a gradient.
    """
    return [
        (leaf, fake.requires_grad)
        for leaf in tree_leaves((node.args, node.kwargs))
        if isinstance(leaf, fx.Node)
        for fake in tensors(leaf.meta.get("val"))
    ]


def _signature(node: fx.Node, capture: Capture, values: Any) -> str:
    """Equal for ops that take equal time: same function, same kinds of arguments."""

    def kind(value: Any) -> Any:
        if isinstance(value, Tensor):
            return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.requires_grad}"
        return repr(value)

    function: Any = node.target
    if node.op == "call_module":
        # A module's text tells neither which of its parameters are trained, nor its mode.
        module = capture.modules[str(node.target)]
        function = module, module.training, [kind(parameter) for parameter in module.parameters()]
    trained = [requires_grad for _, requires_grad in _given(node)]
    return f"{function} {tree_map(kind, values)} {trained} {capture.ops[node.name].mutates != ()}"
