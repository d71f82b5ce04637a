"""Numpy's numbers, and its functions of numbers, which Dynamo takes for tensors.

Models hold them, as `np.sqrt(8)`, and compute them in forward, as `np.prod(self.shape)`: to torch
they are numbers, and so they are to us.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import nn

_DRAWING = np.random.RandomState | np.random.Generator


@contextmanager
def numbers_of_python(model: nn.Module) -> Iterator[None]:
    """Meanwhile modules hold Python's numbers in place of numpy's, in lists and dicts too."""
    changes = [
        (vars(module), name, value, plain)
        for module in model.modules()
        for name, value in vars(module).items()
        if (plain := _plain(value)) is not value
    ]
    for attributes, name, _, plain in changes:
        attributes[name] = plain
    try:
        yield
    finally:
        for attributes, name, value, _ in changes:
            attributes[name] = value


@contextmanager
def functions_of_numbers() -> Iterator[None]:
    """A function of numpy that is given numbers alone, and gives one, is not traced but called.

    Private to torch: tests/test_private.py.
    """
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import NumpyVariable

    call = NumpyVariable.call_function

    @wraps(call)
    def calling(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        drawn = isinstance(getattr(self.value, "__self__", None), _DRAWING)
        if not drawn and all(one.is_python_constant() for one in given):
            found = self.value(
                *(one.as_python_constant() for one in args),
                **{name: one.as_python_constant() for name, one in kwargs.items()},
            )
            if _is_number(found):
                return ConstantVariable.create(found.item())
        return call(self, tx, args, kwargs)

    with patch.object(NumpyVariable, "call_function", calling):
        yield


def _is_number(value: object) -> bool:
    return isinstance(value, np.bool_ | np.integer | np.floating)


def _plain(value: Any) -> Any:
    """`value`, or one that is equal to it and has Python's numbers."""
    if _is_number(value):
        return value.item()
    if type(value) is dict:
        held = {key: _plain(item) for key, item in value.items()}
        return held if any(held[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple):
        items = [_plain(item) for item in value]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return type(value)(items) if changed else value
    return value
