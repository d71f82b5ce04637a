"""Dtypes that forward reads off a tensor, and limits of them, kept as such in the graph.

Dynamo gives `h.dtype` as the dtype that `h` had as it was traced. Under autocast `h` may have
another, as may what a model is given that was moved to another, or its parameters then: each op
that takes the dtype reads it of `h` again. Private to torch:
tests/test_private.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.variables.constant import ConstantVariable

from fxpipe.ops.interpret import limit


class _Read(ConstantVariable):
    """A constant to Python code; an op that takes it reads `function` of the tensor instead."""

    def __init__(
        self, value: Any, function: Callable[..., Any], of: Any, name: str, **kwargs: Any
    ) -> None:
        super().__init__(value, **kwargs)
        self.function, self.of, self.name = function, of, name

    def as_proxy(self) -> Any:
        """A node of its own for each op, as near to it as can be."""
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output = InstructionTranslator.current_tx().output
        of = (self.of.as_proxy(), self.name)
        read = output.create_proxy("call_function", self.function, of, {})
        read.node.meta["example_value"] = self.value
        return read

    def nb_negative_impl(self, tx: Any) -> Any:
        """`-torch.finfo(h.dtype).max` is the least number."""
        if self.name == "max":
            return _Read(-self.value, limit, self.of, "min")
        return super().nb_negative_impl(tx)


class _Limits(ConstantVariable):
    """`torch.finfo` of a dtype that was read."""

    def __init__(self, value: torch.finfo, dtype: _Read, **kwargs: Any) -> None:
        super().__init__(value, **kwargs)
        self.dtype = dtype

    def var_getattr(self, tx: Any, name: str) -> Any:
        """One of the limits."""
        found = super().var_getattr(tx, name)
        value = found.as_python_constant()
        return _Read(value, limit, self.dtype, name) if isinstance(value, float) else found


@contextmanager
def dtypes_read() -> Iterator[None]:
    """Meanwhile an op that Dynamo gives the dtype of a tensor gets `getattr(tensor, "dtype")`."""
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    read, call = TensorVariable.method_attr_dtype, UserDefinedClassVariable.call_function

    @wraps(read)
    def reading(self: Any, tx: Any) -> Any:
        found = read(self, tx)
        dtype = found.as_python_constant() if found is not None else torch.bool
        real = not (dtype.is_floating_point or dtype.is_complex)
        return found if real else _Read(dtype, getattr, self, "dtype")

    @wraps(call)
    def calling(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch.finfo and args and isinstance(args[0], _Read):
            return _Limits(torch.finfo(args[0].value), args[0])
        return call(self, tx, args, kwargs)

    with (
        patch.object(TensorVariable, "method_attr_dtype", reading),
        patch.object(UserDefinedClassVariable, "call_function", calling),
    ):
        yield
