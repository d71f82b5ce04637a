"""A stage at work: its module, its device, and its forward with the error that says where."""

import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fxpipe.errors import FxpipeError, StageError
from fxpipe.runtime.drawing import drawing
from fxpipe.runtime.mailbox import StoppedError
from fxpipe.runtime.manifest import OutputSpec, PortSpec, StageSpec, there
from fxpipe.runtime.random import RandomStream

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `index` on lane `lane`, which is `device`; `path` is its file.

    With `relay` its forward is that, which calls the module's.
    """

    index: int
    spec: StageSpec
    module: nn.Module
    lane: int
    device: torch.device
    path: str
    relay: Callable[..., Any] | None = None

    def compile(self) -> None:
        """Let torch.compile make its forward and backward faster, unless it draws random numbers.

        Compiled code would draw others than the model does.
        """
        if not self.spec.random:
            # Else Inductor's kernels for the CPU keep Python from the other lanes while they run.
            self.module.compile(options={"cpp_wrapper": self.device.type == "cpu"})

    def forward(
        self, inputs: Sequence[Tensor], random: RandomStream | None
    ) -> tuple[tuple[Tensor, ...], RandomStream | None]:
        """`outputs` for `inputs`, and where its random numbers end. Raises StageError."""
        drawn = drawing(random, self.device, self.module) if random is not None else nullcontext()
        given = iter(inputs)
        arguments = [next(given) if self._there(port) else None for port in self.spec.inputs]
        with drawn as mode:
            returned = (self.relay or self.module)(*arguments)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        fit = len(outputs) == len(self.spec.outputs) and all(
            isinstance(output, Tensor) if self._there(spec) else output is None
            for output, spec in zip(outputs, self.spec.outputs, strict=True)
        )
        if not fit:
            names = [spec.value for spec in self.outputs]
            raise StageError(
                f"{self.spec.file} returned {_described(outputs)}, plan.json says {len(names)} "
                f"tensors ({', '.join(names)}): return those, or compile again"
            )
        made = tuple(output for output in outputs if output is not None)
        return made, random if mode is None else mode.end

    @property
    def inputs(self) -> list[PortSpec]:
        """What its forward takes in the mode it is in."""
        return [port for port in self.spec.inputs if self._there(port)]

    @property
    def outputs(self) -> list[OutputSpec]:
        """What its forward makes in the mode it is in."""
        return [output for output in self.spec.outputs if self._there(output)]

    def _there(self, spec: PortSpec | OutputSpec) -> bool:
        return there(spec.mode, self.module.training)

    def trainable(self, bound: frozenset[str]) -> dict[str, Tensor]:
        """Its parameters by name, each once; those in `bound` under each of their names."""
        once = dict(self.module.named_parameters())
        every = dict(self.module.named_parameters(remove_duplicate=False))
        return {name: tensor for name, tensor in every.items() if name in bound or name in once}

    def at(self, action: str, call: Callable[[], T]) -> T:
        """What `call` gives. An error becomes a StageError that says stage, action and line."""
        try:
            return call()
        except (FxpipeError, StoppedError):
            raise
        except Exception as error:
            raise StageError(
                f"stage {self.index} failed in {action}{self._line(error)}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _line(self, error: Exception) -> str:
        # What Dynamo raises while it traces has the stage's own frames in `real_stack`.
        traced = getattr(error, "real_stack", None) or ()
        frames = [*traceback.extract_tb(error.__traceback__), *traced]
        lines = [frame.lineno for frame in frames if frame.filename == self.path]
        if not lines:
            return ""
        linecache.checkcache(self.path)  # the file may have been edited since
        text = linecache.getline(self.path, lines[-1]).strip()
        return f", {self.spec.file}, line {lines[-1]}: `{text}`"


@contextmanager
def swapped(module: nn.Module, kind: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put `tensors` in the place of the module's `_parameters` or `_buffers` of these names."""
    places = [(holder_of(module, name), name.rpartition(".")[2]) for name in tensors]
    before = [getattr(holder, kind)[leaf] for holder, leaf in places]
    for (holder, leaf), tensor in zip(places, tensors.values(), strict=True):
        getattr(holder, kind)[leaf] = tensor
    try:
        yield
    finally:
        for (holder, leaf), tensor in zip(places, before, strict=True):
            getattr(holder, kind)[leaf] = tensor


def holder_of(module: nn.Module, name: str) -> nn.Module:
    """The submodule that holds the parameter or buffer `name`."""
    for part in name.split(".")[:-1]:
        # Not `get_submodule`: a child may have the name of a method.
        child = module._modules[part]
        assert child is not None
        module = child
    return module


def _described(outputs: Sequence[object]) -> str:
    kinds = [type(output).__name__ for output in outputs]
    return f"{len(kinds)} values ({', '.join(kinds)})"
