"""What ops do that a graph does not say: memory they share, values they write, random numbers.

Seen as it runs, so that no list of op names has to be complete.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxpipe.capture.shared import owners
from fxpipe.ir import Op
from fxpipe.memory import is_fake, storage_of
from fxpipe.ops.interpret import MODE, Compute
from fxpipe.runtime.manifest import Mode
from fxpipe.runtime.promises import draws, given_by_name, writes

_MODES: Mapping[bool | None, Mode] = {None: "both", True: "train", False: "eval"}


class Observer:
    """A hook for `run_graph` that fills `ops`. Keeps every value alive while it is."""

    def __init__(self, modules: Mapping[str, nn.Module], state: Mapping[str, Tensor]) -> None:
        self.ops: dict[str, Op] = {}
        self._modules = modules
        self._owner = owners(state)
        self._buffers = {
            storage_of(tensor): tensor
            for tensor in state.values()
            if not isinstance(tensor, nn.Parameter)
        }
        self._alive: list[Any] = []

    def __call__(
        self, node: fx.Node, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute the op and note what it did."""
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        for tensor in given:  # an input of the graph is met here first
            self._owner.setdefault(storage_of(tensor), self._argument_name(node, tensor, args))
        statistics = list(self._statistics(node, given))
        with _Watch() as watch:
            result = compute(args, kwargs)
        written = {name for name, changed in statistics if changed()}
        written |= {self._owner[storage] for storage in watch.written & self._owner.keys()}
        storage = node.name
        if isinstance(result, Tensor):
            storage = self._owner.setdefault(storage_of(result), node.name)
        self._alive.append((result, given))
        self.ops[node.name] = Op(
            name=node.name,
            module=node.meta.get("module", ""),
            source=node.meta.get("source"),
            storage=storage,
            mutates=tuple(sorted(written)),
            random=watch.random,
            mode=_MODES[node.meta.get(MODE)],
        )
        return result

    def _argument_name(self, node: fx.Node, tensor: Tensor, args: tuple[Any, ...]) -> str:
        for argument, value in zip(node.args, args, strict=True):
            if value is tensor and isinstance(argument, fx.Node):
                return argument.name
        return node.all_input_nodes[0].name

    def _statistics(
        self, node: fx.Node, given: list[Tensor]
    ) -> Iterator[tuple[str, Callable[[], bool]]]:
        """(name of a buffer's storage, whether its content has changed since now).

        Batch norm's kernels write running statistics of which their schemas say nothing.
        """
        buffers = [tensor for tensor in given if storage_of(tensor) in self._buffers]
        if node.op == "call_module":
            buffers += self._modules[str(node.target)].buffers()
        for tensor in buffers:
            if not is_fake(tensor):
                yield self._owner[storage_of(tensor)], _content_changed(tensor)


def _content_changed(tensor: Tensor) -> Callable[[], bool]:
    before = tensor.detach().clone()
    return lambda: not torch.equal(before, tensor)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees ops that draw from torch's random generators, and the memories that they write.

    Of fake tensors the running statistics too: no kernel runs that would.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = given_by_name(func, args, kwargs)
        self.random |= draws(func, args, kwargs)
        self.written |= {storage_of(tensor) for tensor in writes(func, args, kwargs)}
        if "running_mean" in given and given.get("training", True):
            held = (given["running_mean"], given["running_var"])
            self.written |= {storage_of(t) for t in held if t is not None and is_fake(t)}
        return func(*args, **(kwargs or {}))
