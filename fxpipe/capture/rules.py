"""Rules that Dynamo lacks, of calls that change nothing here. All of it is private to torch.

So tests/test_private.py names it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch


@contextmanager
def more_rules() -> Iterator[None]:
    """While it is open, Dynamo traces what these rules are for."""
    from torch._dynamo.variables.builtin import SetAttrBuiltinVariable
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    set_attribute = SetAttrBuiltinVariable._call_setattr
    call = TorchInGraphFunctionVariable.call_function

    @wraps(set_attribute)
    def setting(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        """`x.requires_grad = True` asks for gradients of an input, which no parameter's needs."""
        if obj.is_tensor() and _is(name, "requires_grad") and _is(value, True):
            return ConstantVariable.create(None)
        return set_attribute(self, tx, obj, name, value)

    @wraps(call)
    def calling(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """`generator=None` is the default, which `torch.randn` takes with open sizes alone."""
        given = {k: v for k, v in kwargs.items() if not (k == "generator" and _is(v, None))}
        return call(self, tx, args, given)

    with (
        patch.object(SetAttrBuiltinVariable, "_call_setattr", setting),
        patch.object(TorchInGraphFunctionVariable, "call_function", calling),
    ):
        yield


def _is(variable: Any, value: object) -> bool:
    if not variable.is_python_constant():
        return False
    found = variable.as_python_constant()
    return type(found) is type(value) and bool(found == value)
