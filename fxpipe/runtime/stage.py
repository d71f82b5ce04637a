"""A stage at work: its module, its device, and its forward with the error that says where."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fxpipe.errors import FxpipeError, PackageError, StageError
from fxpipe.runtime.backward import differentiable
from fxpipe.runtime.batchnorm import defer
from fxpipe.runtime.drawing import drawing
from fxpipe.runtime.lines import line_of
from fxpipe.runtime.mailbox import StoppedError
from fxpipe.runtime.manifest import OutputSpec, PortSpec, StageSpec, there
from fxpipe.runtime.promises import keeping, kept
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.recomputing import is_recomputing
from fxpipe.runtime.segment import Forward
from fxpipe.runtime.swapping import parameter_of
from fxpipe.schedule import Action

T = TypeVar("T")

_UNDRAWN = nullcontext()


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `index` on lane `lane`, which is `device`; `path` is its file.

    With `relay` its forward is that, which calls the module's. `recomputes` lets its file say what
    of the forward is computed again in backward. `frozen` are those of its parameters that were not
    trained when the model was compiled.
    """

    index: int
    spec: StageSpec
    module: nn.Module
    lane: int
    device: torch.device
    path: str
    relay: Callable[..., Any] | None = None
    recomputes: bool = True
    frozen: frozenset[str] = frozenset()

    def compile(self) -> None:
        """Let torch.compile make its forward and backward faster, where it would do the same.

        Compiled code would draw other random numbers than the model does, torch's own checkpoint in
        it could count twice what a segment counts in a buffer, and what is written to a number in
        float64, which any floating one may become, would be lost.
        """
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        written = [buffers[name] for name in self.spec.mutated_buffers]
        counts = self.spec.segments and written
        loses = any(b.dim() == 0 and b.is_floating_point() for b in written)
        if not (self.spec.random or counts or loses):
            from fxpipe.runtime.written_out import WrittenOut  # a second, for inductor

            # Else Inductor's kernels for the CPU keep Python from the other lanes while they run.
            options = {"cpp_wrapper": self.device.type == "cpu"}
            self.module.compile(options=options | {"post_grad_custom_pre_pass": WrittenOut()})

    def defer_batch_norm(self, n_microbatches: int) -> None:
        """Let its batch norms update their statistics once for all micro-batches, if they can.

        Raises PackageError.
        """
        try:
            defer(self.module, self.spec.mutated_buffers, n_microbatches)
        except ValueError as error:
            raise PackageError(
                f"{self.spec.file}: {error}; load without deferred_batch_norm"
            ) from error

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile runs it: its backward is one, and can't be halved."""
        return self.module._compiled_call_impl is not None

    def forward(
        self,
        inputs: Sequence[Tensor],
        random: RandomStream | None,
        again: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> tuple[tuple[Tensor, ...], RandomStream | None]:
        """`outputs` for `inputs`, and where its random numbers end.

        In backward a segment is computed within an `again()`. Raises StageError.
        """
        drawn = drawing(random, self.device, self.module) if random is not None else _UNDRAWN
        given = iter(inputs)
        arguments = [next(given) if self._there(port) else None for port in self.spec.inputs]
        written = self.spec.mutated_buffers
        known = self.is_compiled or kept(self.module)
        with _UNDRAWN if known else keeping(self.module, self.spec), drawn as mode:
            forward = Forward(self.module, self.device, written, mode, again)
            with forward.running(self.recomputes and not is_recomputing()):
                returned = (self.relay or self.module)(*arguments)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        specs = self.spec.outputs
        if len(outputs) != len(specs) or not all(map(self._fits, outputs, specs)):
            names = [spec.value for spec in self.outputs]
            raise StageError(
                f"{self.spec.file} returned {_described(outputs)}, plan.json says {len(names)} "
                f"tensors ({', '.join(names)}): return those, or compile again"
            )
        made = tuple(
            _as_seen(output, spec)
            for output, spec in zip(outputs, specs, strict=True)
            if output is not None
        )
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
        return spec.mode == "both" or there(spec.mode, self.module.training)

    def _fits(self, output: object, spec: OutputSpec) -> bool:
        return isinstance(output, Tensor) if self._there(spec) else output is None

    def gradients(self, outputs: Sequence[Tensor], given: Sequence[bool]) -> list[bool]:
        """Which of the outputs, computed without a graph, will have a gradient.

        `given` says which inputs have one. Those outputs may that had one as the model was traced,
        and all where something has one now that had none.
        """
        as_traced = (
            self.module.training
            and not any(parameter_of(self.module, name).requires_grad for name in self.frozen)
            and all(
                port.spec.requires_grad >= has for port, has in zip(self.inputs, given, strict=True)
            )
        )
        graph = any(given) or any(p.requires_grad for p in self.module.parameters())
        return [
            graph
            and differentiable(output)
            and (spec.spec.requires_grad or not as_traced)
            and not spec.detached
            for output, spec in zip(outputs, self.outputs, strict=True)
        ]

    def trainable(self, bound: frozenset[str]) -> dict[str, Tensor]:
        """Its parameters by name, each once; those in `bound` under each of their names."""
        once = dict(self.module.named_parameters())
        every = dict(self.module.named_parameters(remove_duplicate=False))
        return {name: tensor for name, tensor in every.items() if name in bound or name in once}

    def by_every_name(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is `given` for parameters by one of their names, by all that they have here."""
        if not given:
            return {}
        every = dict(self.module.named_parameters(remove_duplicate=False))
        # Of a weight that another device owns there is nothing here between calls.
        found = {id(every[name]): tensor for name, tensor in given.items() if name in every}
        others = {k: found[id(one)] for k, one in every.items() if id(one) in found}
        return {**others, **given}

    def at(self, action: str | Action, call: Callable[[], T]) -> T:
        """What `call` gives. An error becomes a StageError that says stage, action and line."""
        try:
            return call()
        except (FxpipeError, StoppedError):
            raise
        except Exception as error:
            line = line_of(error, self.path, self.is_compiled)
            where = f", {self.spec.file}{line}" if line else ""
            lost = self.is_compiled and not line
            way_out = "; load without compile=True to see the line" if lost else ""
            raise StageError(
                f"stage {self.index} failed in {action}{where}: "
                f"{type(error).__name__}: {error}{way_out}"
            ) from error


def _as_seen(output: Tensor, spec: OutputSpec) -> Tensor:
    """The output, without a graph where no gradient comes to it.

    A view made under no_grad says that it has a gradient, and ends all graphs.
    """
    ends = output.requires_grad and output.grad_fn is None and output._is_view()
    return output.detach() if spec.detached or ends else output


def _described(outputs: Sequence[object]) -> str:
    kinds = [type(output).__name__ for output in outputs]
    return f"{len(kinds)} values ({', '.join(kinds)})"
