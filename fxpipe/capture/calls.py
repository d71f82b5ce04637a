"""The check of a model without memory: does the graph make the torch calls that the model does?

No values can be compared. But both run on fake tensors, and there what each op of torch itself is
called with can be: dtypes, shapes, strides, constants, and which tensors it reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fxpipe.capture.check import Checked
from fxpipe.capture.dynamo import FlatModel
from fxpipe.capture.observe import Observer
from fxpipe.capture.refuse import refuse_writes
from fxpipe.capture.shared import merge_ops
from fxpipe.errors import CaptureError, FxpipeError, InputError
from fxpipe.memory import Faked, faked, storage_of
from fxpipe.ops.interpret import DTYPE, TRAINING, model_dtype, run_graph
from fxpipe.runtime.leaves import in_mode, places
from fxpipe.runtime.structure import Structure


@dataclass(frozen=True, slots=True)
class CallCheck:
    """Runs graph and model one after the other on fake tensors like `inputs`."""

    flat: FlatModel
    graph: fx.Graph
    modules: Mapping[str, nn.Module]
    state: Mapping[str, Tensor]
    inputs: Sequence[Tensor]
    outputs: Structure

    def run(self) -> Checked:
        """Both modes. Raises InputError if the model by itself fails in train mode, and
        CaptureError if the graph does or forward writes a parameter.
        """
        with self._modes_kept(), faked(self.flat) as fake:
            try:
                ops, trains = self._compare(fake, training=True)
            except FxpipeError:
                raise
            except Exception as error:
                raise CaptureError(f"the captured graph fails in train mode: {error}") from error
            refuse_writes(ops.ops, self.state)
            try:
                others, evaluates = self._compare(fake, training=False)
            except CaptureError:
                raise
            except Exception:  # another output in eval mode, or no such rows
                others, evaluates = ops, False
        merged = merge_ops(self.graph, self.modules, self.state, ops.ops, others.ops)
        return Checked(merged, trains, evaluates, evaluates)

    def _compare(self, fake: Faked, training: bool) -> tuple[Observer, bool]:
        """What the graph's ops do, and whether graph and model make the same calls."""
        state = {name: fake(tensor) for name, tensor in self.state.items()}
        observer = Observer(self.modules, state)
        self.flat.train(training)
        with fake.mode, torch.set_grad_enabled(training):
            attributes = {**state, TRAINING: training, DTYPE: model_dtype(self.flat)}
            given = fake.copies(self.inputs)

            def run() -> list[Tensor]:
                made = run_graph(self.graph, self.modules, attributes, given, observer)
                return [made[place] for place in places(in_mode(self.outputs, training))]

            same = self._plain(fake) == calls_of(run)
        return observer, same

    def plain(self) -> None:
        """Run the model by itself in train mode. Raises InputError if it fails."""
        with self._modes_kept(), faked(self.flat) as fake, fake.mode:
            self.flat.train()
            self._plain(fake)

    def _plain(self, fake: Faked) -> list[Any]:
        """What the model by itself calls, in the mode that it is in."""
        inputs = fake.copies(self.inputs)
        try:
            return calls_of(lambda: self.flat(*inputs))
        except FxpipeError:
            raise
        except Exception as error:
            raise InputError(
                f"the model by itself can't be run on these inputs: {error}"
            ) from error

    @contextmanager
    def _modes_kept(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.flat.modules()]
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def calls_of(run: Callable[[], Sequence[Tensor]]) -> list[Any]:
    """What `run` calls, and what it gives."""
    calls = Calls()
    with calls:
        given = run()
    return [*calls.found, *map(calls.kind, given)]


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each call that reaches torch's ops; tensors by kind and by whose memory they are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Any] = []
        self.numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "prim" and not func.is_view:  # a view shows in who reads it
            self.found.append((func, tree_map_only(Tensor, self.kind, (args, kwargs))))
        return func(*args, **kwargs)

    def kind(self, tensor: Tensor) -> tuple[Any, ...]:
        """All but the values."""
        self._alive.append(tensor)
        number = self.numbers.setdefault(storage_of(tensor), len(self.numbers))
        return number, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
