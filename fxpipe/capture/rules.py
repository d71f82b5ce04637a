"""Rules that Dynamo lacks. All of it is private to torch: tests/test_private.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from fxpipe.capture.causal import causal_masks_known
from fxpipe.capture.dtype_reads import dtypes_read
from fxpipe.capture.formals import noted_formals
from fxpipe.capture.numpy_numbers import functions_of_numbers
from fxpipe.capture.sizes_equated import sizes_equated
from fxpipe.capture.texts import texts_left_open
from fxpipe.ops.constants import same

_CHECKS = (
    torch._check,
    torch._check_index,
    torch._check_value,
    torch._check_type,
    torch._check_not_implemented,
)


@contextmanager
def more_rules() -> Iterator[None]:
    """Calls that change nothing here are traced, though Dynamo refuses them.

    And a tensor is unpacked by one op, as torch does it: Dynamo's own indices, one for each item,
    take more ops in backward, each of which makes a whole gradient. `torch.jit.isinstance`
    is Python's own. What a forward is given is noted. `h.detach_()` is `h = h.detach()` for all
    that hold `h`: in place, ops after it would seem to read what has gradients.
    """
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    setter, name_of_rule = _setattr_rule()
    set_attribute = getattr(setter, name_of_rule)
    call = TorchInGraphFunctionVariable.call_function
    unpack = TensorVariable.unpack_var_sequence
    requires = TensorVariable.method_requires_grad_

    @wraps(set_attribute)
    def setting(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        """`x.requires_grad = True` asks for gradients of an input, which no parameter's needs."""
        if obj.is_tensor() and _is(name, "requires_grad") and _is(value, True):
            return ConstantVariable.create(None)
        return set_attribute(self, tx, obj, name, value)

    @wraps(requires)
    def requiring(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        """`h.requires_grad_()` as well, which a hook calls for reentrant checkpoints."""
        asks = requires_grad is True or _is(requires_grad, True)
        if asks and not isinstance(self.as_proxy().node.meta["example_value"], nn.Parameter):
            return self
        return requires(self, tx, requires_grad)

    @wraps(call)
    def calling(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """`generator=None` is the default, which `torch.randn` takes with open sizes alone."""
        if self.value is torch.detach_:
            return args[0].call_method(tx, "detach_", args[1:], kwargs)
        if self.value in _CHECKS:  # no graph holds their messages
            return call(self, tx, args[:1], {k: v for k, v in kwargs.items() if k != "message"})
        given = {k: v for k, v in kwargs.items() if not (k == "generator" and _is(v, None))}
        return call(self, tx, args, given)

    @wraps(unpack)
    def unpacking(self: Any, tx: Any, idxes: Any = None) -> Any:
        """`a, b = x`, or `for a in x`, is `x.unbind(0)`."""
        if type(self) is not TensorVariable:
            return unpack(self, tx, idxes)
        rows = self.call_method(tx, "unbind", [ConstantVariable.create(0)], {})
        items = rows.unpack_var_sequence(tx)
        if idxes is not None and len(items) != len(idxes):
            return unpack(self, tx, idxes)  # which says so
        return items

    def detaching(self: Any, tx: Any) -> Any:
        proxy = self.as_proxy()
        if proxy.tracer is tx.output.current_tracer:
            self.proxy = self.call_method(tx, "detach", [], {}).as_proxy()
            self.synchronize_attributes(tx)
        else:  # of what was made outside of a checkpoint: it is refused
            tx.output.create_proxy("call_method", "detach_", (proxy,), {})
        return self

    with (
        noted_formals(),
        causal_masks_known(),
        dtypes_read(),
        functions_of_numbers(),
        sizes_equated(),
        texts_left_open(),
        _calls_counted(),
        _handlers_apart(),
        _segments_opened(),
        patch("torch.jit.isinstance", _is_instance),
        patch.object(TensorVariable, "unpack_var_sequence", unpacking),
        patch.object(TensorVariable, "method_requires_grad_", requiring),
        # Dynamo's own rule, which torch has since 2.13.
        patch.object(TensorVariable, "method_detach_", detaching, create=True),
        patch.object(setter, name_of_rule, setting),
        patch.object(TorchInGraphFunctionVariable, "call_function", calling),
    ):
        yield


@contextmanager
def _segments_opened() -> Iterator[None]:
    """`checkpoint_sequential` calls its functions one by one: Dynamo opens `checkpoint` alone."""
    own = checkpoint_sequential.__code__
    checkpoint_sequential.__code__ = _one_by_one.__code__
    try:
        yield
    finally:
        checkpoint_sequential.__code__ = own


def _one_by_one(
    functions: Any, segments: Any, input: Any, use_reentrant: Any = None, **kwargs: Any
) -> Any:
    for function in functions:
        input = function(input)
    return input


def _is_instance(value: Any, kind: Any) -> bool:
    return isinstance(value, kind)


def _setattr_rule() -> tuple[Any, str]:
    """The class, and the method, that `setattr` is traced by: before torch 2.13 one for all."""
    from torch._dynamo.variables import builtin

    if hasattr(builtin, "SetAttrBuiltinVariable"):
        return builtin.SetAttrBuiltinVariable, "_call_setattr"
    return builtin.BuiltinVariable, "call_setattr"


@contextmanager
def _calls_counted() -> Iterator[None]:
    """The calls of a module are numbered, by whichever of its names: else two have one key."""
    from torch._dynamo.variables import nn_module

    record = nn_module.record_nn_module_stack
    first: dict[int, Any] = {}

    def recording(key: str, source: Any, tx: Any, module: Any) -> Any:
        return record(key, first.setdefault(id(module), source), tx, module)

    with patch.object(nn_module, "record_nn_module_stack", recording):
        yield


@contextmanager
def _handlers_apart() -> Iterator[None]:
    """Dynamo keeps the methods that built-ins are traced by: not ours, and not for us."""
    from torch._dynamo.variables.builtin import BuiltinVariable

    with patch.dict(BuiltinVariable.call_function_handler_cache, clear=True):
        yield


@contextmanager
def functions_as_ops() -> Iterator[None]:
    """Each custom autograd.Function becomes one op, as `torch.compiler.allow_in_graph` does.

    Dynamo's own way, a graph forward and a graph backward, has no sizes in its `ctx`, and is not
    taken where no gradient is asked for just now.
    """
    from torch._dynamo import trace_rules

    allowed = trace_rules.is_callable_allowed

    def allows(value: Any) -> bool:
        function = isinstance(value, type) and issubclass(value, torch.autograd.Function)
        return allowed(value) or (function and not value.__module__.startswith("torch."))

    with patch.object(trace_rules, "is_callable_allowed", allows):
        yield


def _is(variable: Any, value: object) -> bool:
    return variable.is_python_constant() and same(variable.as_python_constant(), value)
