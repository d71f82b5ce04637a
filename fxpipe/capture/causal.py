"""Masks that `nn.Transformer` finds to be causal: it then takes a faster kernel, and no mask.

It compares values, which tracing can't. Here a mask counts as causal if the forward has made it as
`nn.Transformer.generate_square_subsequent_mask` does, and not written it since; any other mask says
enough by itself.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.nn import functional as F
from torch.nn.modules import transformer

_READERS = (F.multi_head_attention_forward, F.scaled_dot_product_attention)


@contextmanager
def causal_masks_known() -> Iterator[None]:
    """Meanwhile Dynamo answers `_detect_is_causal_mask` so. Private: tests/test_private.py."""
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.functions import UserFunctionVariable

    call = UserFunctionVariable.call_function

    @wraps(call)
    def calling(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is not transformer._detect_is_causal_mask:
            return call(self, tx, args, kwargs)
        mask, told, *_ = args
        if told.is_python_constant() and told.as_python_constant() is not None:
            return ConstantVariable.create(told.as_python_constant() is True)
        return ConstantVariable.create(mask.is_tensor() and _is_causal(mask.as_proxy().node))

    with patch.object(UserFunctionVariable, "call_function", calling):
        yield


def _is_causal(mask: fx.Node) -> bool:
    """Whether it is made of minus infinity above the diagonal, and only attention has read it."""
    made = mask.args[0] if mask.target is torch.triu else None
    if not isinstance(made, fx.Node) or made.target is not torch.full or len(made.users) > 1:
        return False
    diagonal = mask.kwargs.get("diagonal", mask.args[1] if len(mask.args) > 1 else 0)
    size, value = made.args[:2]
    is_square = isinstance(size, tuple | list) and len(size) == 2 and size[0] == size[1]
    is_as_made = all(user.target in _READERS for user in mask.users)
    return bool(is_square and value == -math.inf and diagonal == 1 and is_as_made)
