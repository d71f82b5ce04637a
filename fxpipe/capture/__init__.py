"""Capture: the model as one torch-level graph under its own names, checked against the model."""

import hashlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.capture.check import Result, compare, observe_run, refuse_new_buffers
from fxpipe.capture.dynamo import FlatModel, dynamo_graph, user_place
from fxpipe.capture.graph import own_graph
from fxpipe.capture.modes import depends_on_mode, merge_modes
from fxpipe.capture.names import model_names
from fxpipe.capture.observe import Observer, merge_ops
from fxpipe.capture.stock_calls import call_stock_modules
from fxpipe.errors import CaptureError, InputError
from fxpipe.interpret import DTYPE, TRAINING, Hook, model_dtype, plainly, run_graph, untouched
from fxpipe.ir import Capture, Input, Op
from fxpipe.runtime.manifest import TensorSpec
from fxpipe.runtime.structure import Structure, describe, rebuild
from fxpipe.specs import literal, tensor_spec

__all__ = ["capture", "flat_inputs"]


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Capture:
    """Trace `model` in train mode on example inputs, the batch (dimension 0) left open.

    A tensor whose dimension 0 is as long as the first tensor's is a batch of rows; others go whole
    to each micro-batch. Parameters, buffers, random state and train flags are as before afterwards.
    Raises InputError if forward does not take the inputs, CaptureError if it can't be captured.
    """
    signature, given = _bind(model, args, kwargs)
    input_structure, tensors = describe(given)
    batch, batched = _batch(tensors)
    if batch == 1:  # a size of 1 would be taken for a constant
        tensors = _rows(tensors, batched, [0, 0])
    names = model_names(model)
    with untouched(model, names.state):
        model.train()
        before = dict(model.named_buffers(remove_duplicate=False))
        output_structure, _ = describe(_call(model, rebuild(input_structure, _copies(tensors))))
        refuse_new_buffers(model, before)
        flat = FlatModel(model, input_structure, output_structure)
        inputs = _input_names(input_structure, len(tensors))

        def trace(
            flat: FlatModel, tensors: Sequence[Tensor]
        ) -> tuple[fx.Graph, dict[str, nn.Module]]:
            own_names = names if flat.model is model else model_names(flat.model)
            graph = own_graph(dynamo_graph(flat, tensors, batched), own_names, inputs)
            return graph, call_stock_modules(graph, flat.model)

        graph, modules = trace(flat, tensors)
    other = _rows(tensors, batched, [*range(len(tensors[0])), 0]) if any(batched) else tensors
    check = _Check(flat, graph, modules, names.state, other)
    if depends_on_mode(graph, model_dtype(model)) or not check.agrees_in_eval_mode():
        with untouched(model, names.state):
            modules.update(merge_modes(graph, flat, tensors, trace))
    ops, checked = check.run()
    _drop_dead(graph, ops)
    literals, specs = _describe_values(graph)
    found = {name: op for name, op in ops.items() if name in specs or name not in literals}
    live = {node.name for node in graph.nodes}
    return Capture(
        model_name=type(model).__name__,
        graph=graph,
        modules=modules,
        ops={name: op for name, op in found.items() if name in live},
        literals=literals,
        specs=specs,
        inputs=tuple(Input(name, b) for name, b in zip(inputs, batched, strict=True)),
        input_structure=input_structure,
        signature=signature,
        outputs=_outputs(graph),
        output_structure=output_structure,
        state=names.state,
        aliases=names.aliases,
        saved=names.saved,
        batch=batch,
        fingerprint=_fingerprint(graph, specs),
        checked=checked,
    )


def flat_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a call in the order of `Capture.inputs`."""
    return describe(_bind(model, args, kwargs)[1])[1]


def _bind(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of forward's parameters and those that are given, by name."""
    parameters = inspect.signature(model.forward).parameters.values()
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(str(parameter) for parameter in parameters)
        raise InputError(
            f"the inputs don't fit {type(model).__name__}.forward({names}): {error}"
        ) from error
    given = dict(bound.arguments)
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL and given.pop(parameter.name, ()):
            raise InputError(
                f"forward takes *{parameter.name}: give each input a parameter of its own"
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(parameter.name, {}))
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return tuple(dict.fromkeys([*plain, *given])), given


def _batch(tensors: Sequence[Tensor]) -> tuple[int, list[bool]]:
    rows = [len(tensor) for tensor in tensors if tensor.dim()]
    if not rows:
        raise InputError("no input is a tensor with a batch dimension: give at least one")
    return rows[0], [tensor.dim() > 0 and len(tensor) == rows[0] for tensor in tensors]


def _rows(tensors: Sequence[Tensor], batched: Sequence[bool], rows: list[int]) -> list[Tensor]:
    """The same inputs with other rows of their batch."""
    return [
        tensor.detach()[rows].requires_grad_(tensor.requires_grad) if is_batched else tensor
        for tensor, is_batched in zip(tensors, batched, strict=True)
    ]


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same inputs once more, since forward may write into them."""
    return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]


def _call(model: nn.Module, given: dict[str, Any]) -> Any:
    try:
        return model(**given)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__}.forward fails on these inputs {user_place(error)}\n"
            f"{type(error).__name__}: {error}"
        ) from error


def _input_names(structure: Structure, count: int) -> list[str]:
    """A name for each tensor of the inputs: its parameter's, with its place inside if nested."""
    names = [""] * count

    def walk(node: Structure, name: str) -> None:
        kind, inner = next(iter(node.items()))
        if kind == "tensor":
            names[inner] = re.sub(r"\W", "_", name)
        elif kind in ("tuple", "list"):
            for k, child in enumerate(inner):
                walk(child, f"{name}_{k}")
        elif kind == "dict":
            for key, child in inner.items():
                walk(child, f"{name}_{key}" if name else key)
        elif kind == "class":
            for key, child in node["fields"].items():
                walk(child, f"{name}_{key}")

    walk(structure, "")
    return names


@dataclass(frozen=True, slots=True)
class _Check:
    """Runs graph and model side by side on `inputs`."""

    flat: FlatModel
    graph: fx.Graph
    modules: Mapping[str, nn.Module]
    state: Mapping[str, Tensor]
    inputs: Sequence[Tensor]

    def run(self) -> tuple[dict[str, Op], str]:
        """What the ops do, and in which modes graph and model agree, in words.

        Raises CaptureError if they differ in train mode, InputError if the model by itself fails.
        """
        training = Observer(self.modules, self.state)
        try:
            expected = self._plain(training=True)
        except RuntimeError as error:
            raise InputError(
                f"the model by itself can't be trained on these inputs: {error}"
            ) from error
        difference = compare(expected, self._captured(True, training))
        if difference is not None:
            raise CaptureError(
                f"the captured graph does not compute what the model does in train mode: "
                f"{difference}"
            )
        evaluation = Observer(self.modules, self.state)
        agrees = self.agrees_in_eval_mode(evaluation)
        ops = merge_ops(self.graph, training.ops, evaluation.ops)
        return ops, "train and eval" if agrees else "train"

    def agrees_in_eval_mode(self, hook: Hook = plainly) -> bool:
        """Whether both give the same outputs in eval mode."""
        try:
            with torch.no_grad():
                return compare(self._plain(False), self._captured(False, hook)) is None
        except (InputError, RuntimeError, ValueError):  # another output, or an op of train mode
            return False

    def _plain(self, training: bool) -> Result:
        return observe_run(
            lambda: self.flat(*_copies(self.inputs)), self.flat, self.state, training
        )

    def _captured(self, training: bool, hook: Hook) -> Result:
        attributes = {**self.state, TRAINING: training, DTYPE: model_dtype(self.flat)}
        return observe_run(
            lambda: run_graph(self.graph, self.modules, attributes, _copies(self.inputs), hook),
            self.flat,
            self.state,
            training,
        )


def _drop_dead(graph: fx.Graph, ops: Mapping[str, Op]) -> None:
    """Erase what nobody reads, but for ops that write, draw random numbers or open regions."""
    for node in reversed(list(graph.nodes)):
        op = ops.get(node.name)
        effects = op is not None and (op.mutates or op.random or node.meta.get("val") is None)
        if not node.users and node.op not in ("placeholder", "output") and not effects:
            graph.erase_node(node)


def _describe_values(graph: fx.Graph) -> tuple[dict[str, str], dict[str, TensorSpec]]:
    """Nodes that are sizes or flags, as text; specs of those that are tensors."""
    literals: dict[str, str] = {}
    specs: dict[str, TensorSpec] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        text = node.meta.get("text") or literal(value)
        if isinstance(value, Tensor):
            specs[node.name] = tensor_spec(value)
        elif text is not None:
            literals[node.name] = text
    return literals, specs


def _outputs(graph: fx.Graph) -> tuple[str, ...]:
    values = graph.output_node().args[0]
    assert isinstance(values, tuple)
    return tuple(value.name for value in values if isinstance(value, fx.Node))


def _fingerprint(graph: fx.Graph, specs: Mapping[str, TensorSpec]) -> str:
    """Equal for the same graph on values of the same kind, whatever the weights."""
    lines = [f"{n.op} {n.name} {n.target} {n.args} {n.kwargs}" for n in graph.nodes]
    lines += [f"{name} {spec}" for name, spec in specs.items()]
    text = re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
