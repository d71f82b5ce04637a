"""Capture: the model as one torch-level graph under its own names, checked against the model."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.capture.assigned import move_writes
from fxpipe.capture.dynamo import FlatModel
from fxpipe.capture.fingerprint import fingerprint
from fxpipe.capture.first_calls import first_calls, refuse_resized
from fxpipe.capture.inputs import batch_of, bind, copies, flat_inputs, input_names, with_rows
from fxpipe.capture.names import model_names
from fxpipe.capture.refuse import (
    refuse_hooks,
    refuse_lazy,
    refuse_new_buffers,
    refuse_shared_memory,
    refuse_written_inputs,
)
from fxpipe.capture.region import Excerpt, Region
from fxpipe.capture.traced import Traced, trace_open
from fxpipe.capture.variables import name_values
from fxpipe.errors import CaptureError
from fxpipe.ir import Capture, Input, Op
from fxpipe.memory import faked, lacks_memory
from fxpipe.ops.interpret import buffers, model_dtype, untouched
from fxpipe.ops.specs import tensor_spec
from fxpipe.runtime.manifest import TensorSpec
from fxpipe.runtime.structure import describe

__all__ = ["capture", "flat_inputs"]


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Capture:
    """Trace `model` in train mode on example inputs, the batch (dimension 0) left open.

    Other sizes of inputs are left open too where the model takes any, such as a sequence's length.
    A tensor whose dimension 0 is as long as that of the first one with more than one row is a batch
    of rows; others go whole to each micro-batch. One that forward writes in place is copied first.
    Parameters, buffers, random state and train flags are as before afterwards. A model without
    memory is captured as well, though no values can be compared. Raises InputError if forward does
    not take the inputs, CaptureError if it can't be captured.
    """
    refuse_lazy(model)
    if not isinstance(model, Region):  # whose parameters stay the program's own
        refuse_hooks(model)
    memoryless = lacks_memory(model)
    form, given = bind(model, args, kwargs)
    input_structure, tensors = describe(given)
    batch, batched = batch_of(tensors)
    if batch == 1:  # a size of 1 would be taken for a constant
        tensors = with_rows(tensors, batched, [0, 0])
    names = model_names(model)
    with untouched(model, names.state):
        model.train()
        with contextlib.ExitStack() as stack:
            calls = copies(tensors), copies(tensors)
            if memoryless:
                fake = stack.enter_context(faked(model))
                stack.enter_context(fake.mode)
                calls = fake.copies(tensors), fake.copies(tensors)
            before = {} if memoryless else buffers(names.state)
            seen = first_calls(model, form, input_structure, tensors, calls)
            refuse_new_buffers(names.saved, model)
            refuse_resized(before, names.state)
            seen.held.put_back()
        inputs = input_names(input_structure)
        if isinstance(model, Excerpt):
            refuse_written_inputs(model, inputs, seen.written)
        flat = FlatModel(model, form, input_structure, seen)
        trace = functools.partial(trace_open, flat, names, tensors, batched, inputs)
        try:
            traced = trace()  # a package has no first call: each is as that one
        except CaptureError:
            if memoryless or not seen.changing:
                raise
            seen.kept.put_back()  # the first one's work for later ones may be beyond a trace
            traced = trace()
    graph, names, outputs = traced.graph, traced.names, traced.outputs
    found = traced.found.ops
    move_writes(graph, found, names.aliases)
    ops = {node.name: found[node.name] for node in graph.nodes if node.name in found}
    _drop_dead(graph, ops)
    refuse_shared_memory(model, _read(graph, traced.modules), names.state, ops)
    tree = dict(model.named_modules(remove_duplicate=False))
    ops = name_values(graph, ops, tree, outputs)
    literals, specs = _describe_values(graph)
    live = _live(graph, literals, ops)
    return Capture(
        model_name=type(model).__name__,
        graph=graph,
        modules=traced.modules,
        tree=tree,
        ops={name: op for name, op in ops.items() if name in live},
        literals=literals,
        specs=specs,
        inputs=tuple(
            Input(node.name, b) for node, b in zip(_placeholders(graph), batched, strict=True)
        ),
        input_structure=input_structure,
        signature=form.signature,
        outputs=_outputs(graph),
        output_structure=outputs,
        state=names.state,
        aliases=names.aliases,
        saved=names.saved,
        functions=traced.functions.text,
        dtype=model_dtype(model),
        batch=batch,
        sizes={name: n for name, n in traced.sizes.values.items() if name != "batch"},
        conditions=traced.sizes.conditions,
        fingerprint=fingerprint(graph, specs),
        checked=_checked(traced, model_dtype(model), memoryless),
        mixed=traced.mixed,
    )


def _checked(traced: Traced, dtype: torch.dtype, memoryless: bool) -> str:
    if not traced.found.agrees_in_train:
        return "nothing"
    modes = "train and eval" if traced.evaluates else "train"
    by_calls = ", by the calls of torch alone" if memoryless else ""
    in_one_dtype = f", in {str(dtype).removeprefix('torch.')} alone" if traced.in_one_dtype else ""
    return f"{modes}{by_calls}{in_one_dtype}"


def _read(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> list[str]:
    """Names of the model's own tensors that ops read."""
    read = dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr"))
    for node in graph.find_nodes(op="call_module"):
        own = modules[str(node.target)].state_dict()
        read.update(dict.fromkeys(f"{node.target}.{name}" for name in own))
    return list(read)


def _drop_dead(graph: fx.Graph, ops: Mapping[str, Op]) -> None:
    """Erase what nobody reads, but for ops that write or draw random numbers."""
    for node in reversed(list(graph.nodes)):
        if not node.users and not _stays(node, ops):
            graph.erase_node(node)


def _stays(node: fx.Node, ops: Mapping[str, Op]) -> bool:
    """Whether it does something even where nobody reads it."""
    op = ops.get(node.name)
    effects = op is not None and (op.mutates or op.random or node.meta.get("val") is None)
    return bool(effects) or node.op in ("placeholder", "output")


def _describe_values(graph: fx.Graph) -> tuple[dict[str, str], dict[str, TensorSpec]]:
    """Nodes that are sizes or flags, as text; specs of those that are tensors."""
    literals: dict[str, str] = {}
    specs: dict[str, TensorSpec] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        text = node.meta.get("text") or node.meta.get("size")
        if isinstance(value, Tensor):
            specs[node.name] = node.meta.get("spec") or tensor_spec(value)
        elif text is not None:
            literals[node.name] = text
    return literals, specs


def _live(graph: fx.Graph, literals: Mapping[str, str], ops: Mapping[str, Op]) -> set[str]:
    """The nodes that are no text, nor read on the way to a size that is text alone."""
    live: set[str] = set()
    for node in reversed(graph.nodes):
        read = any(user.name in live for user in node.users)
        if node.name not in literals and (read or _stays(node, ops)):
            live.add(node.name)
    return live


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _outputs(graph: fx.Graph) -> tuple[str, ...]:
    values = graph.output_node().args[0]
    assert isinstance(values, tuple)
    return tuple(value.name for value in values if isinstance(value, fx.Node))
