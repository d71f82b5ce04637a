"""The numeric check: does the graph compute what the model does? On real data, gradients too.

Tracing can go wrong in silence (a buffer assigned anew, a mode baked in), so every capture is run
against the model at another batch size than the traced one, in train and eval mode: other_rows.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn

from fxpipe.capture.dynamo import FlatModel
from fxpipe.capture.inputs import copies
from fxpipe.capture.names import all_tensors, derived
from fxpipe.capture.observe import Observer
from fxpipe.capture.refuse import refuse_writes
from fxpipe.capture.shared import merge_ops
from fxpipe.difference import distance, largest
from fxpipe.errors import CaptureError, FxpipeError, InputError
from fxpipe.ir import Op
from fxpipe.ops.interpret import (
    DTYPE,
    TRAINING,
    Hook,
    model_dtype,
    plainly,
    run_graph,
    untouched,
)
from fxpipe.runtime.backward import differentiable
from fxpipe.runtime.leaves import constants, in_mode, places
from fxpipe.runtime.structure import Structure, describe

Run = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Result:
    """What one forward and backward gave, by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Checked:
    """What the ops do, and in which modes graph and model agree; in eval mode to the last bit?"""

    ops: dict[str, Op]
    agrees_in_train: bool
    agrees_in_eval: bool
    identical_in_eval: bool


@dataclass(frozen=True, slots=True)
class Check:
    """Runs graph and model side by side on `inputs`.

    Twice in a row, if forward changes attributes, on which a later call may depend.
    """

    flat: FlatModel
    graph: fx.Graph
    modules: Mapping[str, nn.Module]
    state: Mapping[str, Tensor]
    inputs: Sequence[Tensor]
    outputs: Structure

    def run(self) -> Checked:
        """Both modes. Raises CaptureError if the two differ in train mode or forward writes a
        parameter, and InputError if the model by itself fails.
        """
        expected = self.plain()
        training = Observer(self.modules, self.state)
        try:
            found = self._captured(True, training)
        except FxpipeError:
            raise
        except Exception as error:  # of Python's own too, as of chunks that other rows lack
            refuse_writes(training.ops, self.state)  # a backward misses what a write took
            raise CaptureError(f"the captured graph fails in train mode: {error}") from error
        refuse_writes(training.ops, self.state)
        difference = compare(expected, found)
        if difference is not None:
            raise CaptureError(
                f"the captured graph does not compute what the model does in train mode: "
                f"{difference}{self._hint()}"
            )
        evaluation = Observer(self.modules, self.state)
        try:
            with torch.no_grad():
                expected, found = self._plain(False), self._captured(False, evaluation)
        except Exception:  # another output, an op of train mode, or no such rows in eval mode
            agrees = identical = False
        else:
            agrees = compare(expected, found) is None and self._differentiates_in_eval()
            identical = agrees and all(
                torch.equal(tensor, found.outputs[name])
                for name, tensor in expected.outputs.items()
            )
        ops = merge_ops(self.graph, self.modules, self.state, training.ops, evaluation.ops)
        return Checked(ops, True, agrees, identical)

    def plain(self) -> Result:
        """What the model by itself does in train mode. Raises InputError if it fails."""
        try:
            return self._plain(training=True)
        except FxpipeError:
            raise
        except Exception as error:
            raise InputError(
                f"the model by itself can't be trained on these inputs: {error}"
            ) from error

    def _differentiates_in_eval(self) -> bool:
        """Whether gradients are the model's in eval mode too, which `no_grad` may be in or not."""
        try:
            expected = self._plain(training=False)
        except Exception:  # as of cuDNN's recurrent layers
            return True
        try:
            found = self._captured(False, plainly)
        except Exception:
            return False
        return compare(expected, found) is None

    def _plain(self, training: bool) -> Result:
        structure = in_mode(self.flat.outputs, training)

        def run() -> list[Tensor]:
            found, tensors = describe(self.flat.whole(*copies(self.inputs)))
            if found != structure:
                raise CaptureError(_not_fixed(structure, found))
            return tensors

        return self._observed(run, training)

    def graph_outputs(
        self, inputs: Sequence[Tensor], training: bool, hook: Hook = plainly
    ) -> list[Tensor]:
        """What the graph gives; its modules are in the mode that they are in."""
        attributes = {**self.state, TRAINING: training, DTYPE: model_dtype(self.flat)}
        made = run_graph(self.graph, self.modules, attributes, copies(inputs), hook)
        return [made[place] for place in places(in_mode(self.outputs, training))]

    def _captured(self, training: bool, hook: Hook) -> Result:
        return self._observed(lambda: self.graph_outputs(self.inputs, training, hook), training)

    def _observed(self, call: Run, training: bool) -> Result:
        calls = 2 if self.flat.changing else 1
        return observe_run(
            lambda: [output for _ in range(calls) for output in call()],
            self.flat,
            self.state,
            training,
        )

    def _hint(self) -> str:
        if not self.flat.changing:
            return (
                "\nIf torch.compile(model, backend='eager') differs too, torch's tracer takes "
                "another way through forward, as behind torch.compiler.is_compiling(): "
                "--allow-graph-breaks pipelines the model's largest part that is traced right. "
                "Else it is a bug in fxpipe: please report it."
            )
        names = ", ".join(f"`{name}`" for name in self.flat.changing[:5])
        return f"\nA forward changes {names}: what a later call must know belongs in a buffer."


def _not_fixed(structure: Structure, found: Structure) -> str:
    before, after = (dict(constants(one)) for one in (structure, found))
    for path, value in before.items():
        if path in after and after[path] != value:
            return (
                f"output{path} is {value!r} with one batch and {after[path]!r} with a larger one: "
                "a pipeline gives tensors, and else what is the same for every batch. Leave it "
                "out of the output, or make it a tensor"
            )
    return "the output's structure depends on the batch: it must be the same for every batch"


def observe_run(run: Run, flat: FlatModel, state: Mapping[str, Tensor], training: bool) -> Result:
    """Outputs of `run`, gradients of a fixed function of them, and buffers afterwards."""
    with untouched(flat, state):
        flat.held.put_back()  # what one call keeps for the next shows in the second
        flat.train(training)
        return observed(run, flat.model, state)


def observed(run: Run, model: nn.Module, state: Mapping[str, Tensor]) -> Result:
    """The same of a `model` that is put back afterwards, in the mode that it is in."""
    with _each_cast_anew():
        torch.manual_seed(0)
        outputs = run()
        made = derived(model, state)
        now = {k: v for k, v in all_tensors(model) if k in state and k not in made}
        present = {**state, **now}
        buffers = {
            name: tensor.detach().clone()
            for name, tensor in present.items()
            if not isinstance(tensor, nn.Parameter)
        }
        # Both read buffers, which get back their old values behind this block.
        gradients = _gradients(outputs, state)
        values = {str(k): output.detach().clone() for k, output in enumerate(outputs)}
    return Result(values, gradients, buffers)


def _gradients(outputs: Sequence[Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `backward` leaves in the parameters: reentrant checkpoints know no `autograd.grad`."""
    made = [output for output in outputs if output.requires_grad]
    if not made:
        return {}
    generator = torch.Generator(made[0].device).manual_seed(0)
    weights = [
        torch.rand(output.shape, generator=generator, device=output.device, dtype=output.dtype)
        for output in made
    ]
    trained = {name: t for name, t in state.items() if t.requires_grad and t.is_leaf}
    with _without_gradients(trained.values()):
        torch.autograd.backward(made, weights)
        found = {name: tensor.grad for name, tensor in trained.items()}
    return {name: grad for name, grad in found.items() if grad is not None}


@contextmanager
def _each_cast_anew() -> Iterator[None]:
    """Autocast keeps no weights it has cast: how long it would rounds sums of gradients."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with patch("torch.set_autocast_cache_enabled", lambda _: None):
            yield
    finally:
        torch.set_autocast_cache_enabled(kept)


@contextmanager
def _without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Take gradients and what is called with them away for a while."""
    kept = [(p, p.grad, dict(p._post_accumulate_grad_hooks or {})) for p in parameters]
    for parameter, _, hooks in kept:
        parameter.grad = None
        if hooks:
            parameter._post_accumulate_grad_hooks.clear()
    try:
        yield
    finally:
        for parameter, gradient, hooks in kept:
            parameter.grad = gradient
            if hooks:
                parameter._post_accumulate_grad_hooks.update(hooks)


def compare(expected: Result, found: Result) -> str | None:
    """The first thing in which two results differ, in words; None if they agree."""
    for group in ("outputs", "gradients", "buffers"):
        ours: dict[str, Tensor] = getattr(found, group)
        theirs: dict[str, Tensor] = getattr(expected, group)
        if ours.keys() != theirs.keys():
            return f"{group} of {sorted(ours.keys() ^ theirs.keys())} on one side only"
        scale = max((largest(tensor) for tensor in theirs.values()), default=0.0)
        for name, tensor in theirs.items():
            if ours[name].shape != tensor.shape or ours[name].dtype != tensor.dtype:
                return f"{group[:-1]} {name} is {_shape(ours[name])}, not {_shape(tensor)}"
            away = distance(ours[name], tensor)
            # The same ops in the same order: what differs more than the last bits is another op.
            # Gradients are added up in an order that threads may change.
            tolerance = _eps(tensor) ** 0.5 if group == "gradients" else 64 * _eps(tensor)
            allowed = tolerance * max(largest(tensor), 1e-3 * scale)
            if not away <= allowed:
                return f"{group[:-1]} {name} differs by {away:.3g} (allowed {allowed:.3g})"
    return None


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if differentiable(tensor) else 0.0


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
