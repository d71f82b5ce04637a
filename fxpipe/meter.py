"""Measures one op: how long it takes forward and backward, and what its backward keeps.

Ops with the same signature are measured once. Backward is measured by itself, not guessed from
forward by one ratio for all ops (Pfeife, ICML 2025, does the latter).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from fxpipe.interpret import Compute
from fxpipe.ir import Capture, OpCost
from fxpipe.runtime.stream import synchronize

_REPEATS = 5
_ENOUGH_MS = 50.0  # an op that took this long in all is known well enough


@dataclass(frozen=True, slots=True)
class _Measured:
    """Costs of one signature.

    `saved` are the storages that backward keeps: an argument's, by its place among the tensors
    given, the result's own, or, None, one that nothing else has.
    """

    forward_ms: float
    backward_ms: float
    saved: tuple[tuple[int | Literal["result"] | None, int], ...]
    result_bytes: int


class Meter:
    """A hook for `run_graph` that fills `costs`."""

    def __init__(self, capture: Capture, device: torch.device) -> None:
        self.costs: dict[str, OpCost] = {}
        self._capture = capture
        self._device = device
        self._known: dict[str, _Measured] = {}
        tiny = torch.ones(1, device=device, requires_grad=True)
        self._engine_ms = self._backward_ms(tiny + 0, [tiny])

    def __call__(
        self, node: fx.Node, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Measure the op if its signature is new, then compute it."""
        args, kwargs = tree_map(self._moved, (args, kwargs))
        if node.name in self._capture.ops:
            key = _signature(node, self._capture, (args, kwargs))
            if key not in self._known:
                self._known[key] = self._measure(node, compute, args, kwargs)
            self.costs[node.name] = self._cost(node, self._known[key])
        with torch.no_grad():
            return compute(args, kwargs)

    def _moved(self, value: Any) -> Any:
        return self._device if isinstance(value, torch.device) else value

    def _cost(self, node: fx.Node, measured: _Measured) -> OpCost:
        """The costs, storages under the names of this op's values."""
        given = _given(node)
        saved: dict[str, int] = {}
        for k, (place, n_bytes) in enumerate(measured.saved):
            if place is None:
                name = f"{node.name}/saved_{k}"
            else:
                name = self._storage(node if place == "result" else given[place][0])
            saved[name] = n_bytes
        kept = {name: n_bytes for name, n_bytes in saved.items() if name not in self._capture.state}
        return OpCost(
            measured.forward_ms, measured.backward_ms, tuple(kept.items()), measured.result_bytes
        )

    def _storage(self, node: fx.Node) -> str:
        op = self._capture.ops.get(node.name)
        return op.storage if op else str(node.target)

    def _measure(
        self, node: fx.Node, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Measured:
        values = _tensors((args, kwargs))
        trained = {
            id(value): requires_grad
            for (_, requires_grad), value in zip(_given(node), values, strict=True)
        }
        writes = bool(self._capture.ops[node.name].mutates)

        def fresh(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            leaf = value.detach().requires_grad_(trained[id(value)])
            return leaf.clone() if writes else leaf

        times: list[float] = []
        while len(times) < _REPEATS and sum(times) < _ENOUGH_MS:
            given = tree_map(fresh, (args, kwargs))
            start = self._now()
            compute(*given)
            times.append(self._now() - start)
        given = tree_map(fresh, (args, kwargs))
        packed: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(_into(packed), _same):
            result = compute(*given)
        leaves = _tensors(given) + self._parameters(node)
        return _Measured(
            forward_ms=statistics.median(times[1:] or times),
            backward_ms=max(0.0, self._backward_ms(result, leaves) - self._engine_ms),
            saved=_saved(packed, _tensors(given), _tensors(result), self._parameters(node)),
            result_bytes=sum(tensor.nbytes for tensor in _tensors(result)),
        )

    def _parameters(self, node: fx.Node) -> list[Tensor]:
        if node.op != "call_module":
            return []
        module = self._capture.modules[str(node.target)]
        return [*module.parameters(), *module.buffers()]

    def _backward_ms(self, result: Any, leaves: Sequence[Tensor]) -> float:
        """Milliseconds from the results' gradients to those of `leaves`."""
        made = [tensor for tensor in _tensors(result) if tensor.requires_grad]
        wanted = [tensor for tensor in leaves if tensor.requires_grad]
        if not made or not wanted:
            return 0.0
        gradients = [torch.ones_like(tensor) for tensor in made]
        times: list[float] = []
        while len(times) < _REPEATS and sum(times) < _ENOUGH_MS:
            start = self._now()
            torch.autograd.grad(made, wanted, gradients, retain_graph=True, allow_unused=True)
            times.append(self._now() - start)
        return statistics.median(times[1:] or times)

    def _now(self) -> float:
        """Milliseconds, once the device has done all it was given."""
        synchronize(self._device)
        return 1e3 * time.perf_counter()


def _given(node: fx.Node) -> list[tuple[fx.Node, bool]]:
    """The tensors among the arguments, in the order of `_tensors` of their values.

    Each as the node that computes it (or the tuple it is in) and whether it needs a gradient.
    """
    return [
        (leaf, fake.requires_grad)
        for leaf in tree_leaves((node.args, node.kwargs))
        if isinstance(leaf, fx.Node)
        for fake in _tensors(leaf.meta.get("val"))
    ]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _signature(node: fx.Node, capture: Capture, values: Any) -> str:
    """Equal for ops that take equal time: same function, same kinds of arguments."""

    def kind(value: Any) -> Any:
        if isinstance(value, Tensor):
            return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.requires_grad}"
        return repr(value)

    module = repr(capture.modules[str(node.target)]) if node.op == "call_module" else node.target
    trained = [requires_grad for _, requires_grad in _given(node)]
    return f"{module} {tree_map(kind, values)} {trained} {capture.ops[node.name].mutates != ()}"


def _into(packed: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    return pack


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _saved(
    packed: Sequence[Tensor],
    given: Sequence[Tensor],
    result: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[tuple[int | Literal["result"] | None, int], ...]:
    """Each storage among `packed` once: whose it is and its bytes; parameters are left out."""
    places: dict[int, int | Literal["result"]] = {_address(t): "result" for t in result}
    places.update({_address(tensor): place for place, tensor in enumerate(given)})
    storages = {_address(t): t.untyped_storage().nbytes() for t in packed}
    for tensor in parameters:
        storages.pop(_address(tensor), None)
    return tuple((places.get(address), n_bytes) for address, n_bytes in storages.items())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
