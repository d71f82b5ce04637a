"""Dynamo's whole-graph capture, behind one function."""

import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from itertools import islice
from traceback import FrameSummary, walk_tb
from typing import Any
from unittest.mock import patch

import torch
from sympy import preorder_traversal
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchDynamoException
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from fxpipe.capture.failures import PYTHON_DRAWS, frozen_batch, numpy_arrays, unsupported
from fxpipe.capture.first_calls import Seen
from fxpipe.capture.inputs import Form, copies, input_names
from fxpipe.capture.names import attribute
from fxpipe.capture.numpy_numbers import numbers_of_python
from fxpipe.capture.region import Region
from fxpipe.capture.rules import functions_as_ops, more_rules
from fxpipe.errors import CaptureError
from fxpipe.quiet import quiet
from fxpipe.runtime.leaves import in_mode
from fxpipe.runtime.structure import Structure, assemble, imported, tensors_at

_EFFORT, _LONGEST, _DEEPEST = 100_000, 1000, 3
_SETTINGS: dict[str, Any] = {
    "allow_rnn": True,
    "ignore_logging_functions": {print, warnings.warn, logging.Logger.warning},
}


class FlatModel(nn.Module):
    """The model as a function from flat tensors to flat tensors.

    It gets copies of inputs that it writes in place: micro-batches are views of one batch, so what
    one of them keeps for backward would count as written by the next.
    """

    def __init__(self, model: nn.Module, form: Form, inputs: Structure, seen: Seen) -> None:
        super().__init__()
        self.model = model
        self.form = form
        self.inputs = imported(inputs)  # here, since Dynamo does not trace an import
        self.outputs = seen.outputs
        self.assigned = seen.assigned
        self.written = seen.written
        self.changing = seen.changing
        self.held = seen.held

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors of the model's output, given those of its input."""
        return tensors_at(in_mode(self.outputs, self.training), self.whole(*tensors))

    def whole(self, *tensors: Tensor) -> Any:
        """The model's output, given the tensors of its input."""
        given = [
            tensor.clone() if is_written else tensor
            for tensor, is_written in zip(tensors, self.written, strict=True)
        ]
        return self.form.call(self.model, assemble(self.inputs, given))

    def left(self) -> list[Tensor]:
        """What forward left in the place of the buffers in `assigned`."""
        names = self.assigned[self.training]
        return [getattr(*attribute(self.model, name)) for name in names]


def dynamo_graph(
    model: FlatModel, tensors: Sequence[Tensor], batched: Sequence[bool], *, free: bool
) -> fx.Graph:
    """The torch-level graph of `model`, dimension 0 of all batched tensors one symbol.

    If `free`, so is each other dimension that the model does not ask to have its size.
    The outputs are the model's and then those of `model.left`.

    Returns the graph inside its GraphModule (`graph.owning_module`), which holds the model's own
    parameters and buffers by reference. Raises CaptureError with the user's line. A region has been
    traced already.

    `_dynamo_graph_capture_for_export` is private to torch: tests/test_private.py.
    """
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export

    if isinstance(model.model, Region):
        return model.model.traced.graph
    tensors = copies(tensors)
    rows = [tensor for tensor, is_batched in zip(tensors, batched, strict=True) if is_batched]
    for tensor in rows:
        torch._dynamo.mark_dynamic(tensor, 0)
    for tensor, is_batched in zip(tensors, batched, strict=True):
        for k in range(1 if is_batched else 0, tensor.dim() if free else 0):
            torch._dynamo.maybe_mark_dynamic(tensor, k)
    torch._dynamo.reset()

    class OneBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = model

        def forward(self, *tensors: Tensor) -> list[Tensor]:
            sizes = [
                t.size(0) for t, is_batched in zip(tensors, batched, strict=True) if is_batched
            ]
            for size in sizes[1:]:
                torch._check(size == sizes[0])  # type: ignore[no-untyped-call]
            return [*self.flat(*tensors), *self.flat.left()]

    try:
        with (
            quiet(),
            torch._dynamo.config.patch(_SETTINGS),
            patch("torch._dynamo.guards.build_guard_function", _no_guard),
            patch("torch._dynamo.functional_export._compiling_state_context", _compiling),
            # A branch on values. What the checks would tell, a plain forward tells as it is read.
            patch.object(Distribution, "_validate_args", False),
            _average_by_a_number(model),
            # Whose path through three operands is one for a batch size.
            patch.object(torch.backends.opt_einsum, "enabled", False),
            numbers_of_python(model),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # what tracing got wrong, the numeric check finds
            symbols = _distinct_symbols() if free else nullcontext()
            with functions_as_ops(), more_rules(), _transforms_undone(), symbols:
                module = _dynamo_graph_capture_for_export(OneBatch())(*tensors)
    except ConstraintViolationError as error:
        named = zip(input_names(model.inputs), tensors, batched, strict=True)
        whole = {name: tensor.shape for name, tensor, is_batched in named if not is_batched}
        raise CaptureError(frozen_batch(_first_fixed(error), len(rows[0]), whole)) from error
    except (TorchDynamoException, GuardOnDataDependentSymNode, RuntimeError) as error:
        raise CaptureError(unsupported(error)) from error
    except AssertionError as error:
        if "RandomValueSource" in str(error):
            raise CaptureError(PYTHON_DRAWS) from error
        if "NumpyTensorSource" in str(error):  # before torch 2.13
            raise CaptureError(numpy_arrays("an attribute is one")) from error
        raise
    return module.graph


def _first_fixed(error: ConstraintViolationError) -> Sequence[FrameSummary]:
    """Where in the user's code a size was first taken for a number.

    The error's text has a stack for each input, in the order of the inputs: of most, where the
    trace came upon that size again. Private to torch: tests/test_private.py.
    """
    held = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    fixed = (sizes.specialization_stacks for sizes in held if isinstance(sizes, ShapeEnv))
    return next((stack for stacks in fixed for stack in stacks.values()), ())


def _no_guard(_parts: list[str], _arguments: str) -> tuple[str, str]:
    """Stands in for Dynamo's text of shape guards: a third of the time, for what nobody calls."""
    return "", "def ___make_guard_fn(*_): return lambda L: True"


@contextmanager
def _compiling() -> Iterator[None]:
    """Stands in for the state of torch's capture, in which models are told that they are exported.

    They would build masks, say, that they do without as they run. What tells them is a flag, or in
    older torch a table of what is traced as a constant. A scan that libraries import where they are
    compiled and not exported, and use there alone, is not there. Private to torch:
    tests/test_private.py.
    """
    from torch._dynamo.variables.torch import tracing_state_functions

    with (
        patch.object(torch.compiler, "_is_compiling_flag", True),
        patch.dict(tracing_state_functions(), {torch.compiler.is_exporting: False}),
        patch("torch._higher_order_ops.associative_scan.associative_scan", None),
    ):
        yield


@contextmanager
def _distinct_symbols() -> Iterator[None]:
    """Dimensions of equal size are not taken for one, and long reasoning about sizes is an error.

    torch's algebra takes minutes where windows are padded to multiples (Swin). What stands for the
    effort is the length of the expressions compared. Private to torch: tests/test_private.py.
    """
    evaluate = ShapeEnv._maybe_evaluate_static
    effort = 0

    @wraps(evaluate)
    def bounded(self: ShapeEnv, expression: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal effort
        effort += sum(1 for _ in islice(preorder_traversal(expression), _LONGEST))
        if effort > _EFFORT or _nesting(expression) > _DEEPEST:
            raise RuntimeError("sizes are compared by expressions that are too long")
        return evaluate(self, expression, *args, **kwargs)

    distinct = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with distinct, patch.object(ShapeEnv, "_maybe_evaluate_static", bounded):
        yield


def _nesting(expression: Any) -> int:
    """How deep divisions and remainders stand in each other."""
    inside = max(map(_nesting, expression.args), default=0)
    return inside + isinstance(expression, FloorDiv | Mod | PythonMod)


@contextmanager
def _transforms_undone() -> Iterator[None]:
    """Leave no `torch.func` transform open where tracing fails within one.

    Private to torch: tests/test_private.py.
    """
    functorch = torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


@contextmanager
def _average_by_a_number(model: nn.Module) -> Iterator[None]:
    """Batch norms that average over all batches, for which tracing would ask how many there were.

    Each becomes a call of the module again, or else the numeric check tells.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.momentum is None]
    for norm in norms:
        norm.momentum = 0.5
    try:
        yield
    finally:
        for norm in norms:
            norm.momentum = None


def function_of(node: fx.Node) -> type[torch.autograd.Function] | None:
    """The custom autograd.Function that an op of Dynamo's graph applies."""
    from torch._dynamo.variables.misc import produce_trampoline_autograd_apply

    target: Any = node.target
    if getattr(target, "_origin", None) is not produce_trampoline_autograd_apply:
        return None
    found: type[torch.autograd.Function] = inspect.getclosurevars(target).nonlocals["fn_cls"]
    return found
