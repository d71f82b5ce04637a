"""Sizes that data decides, which `torch._check` equates to others.

Private to torch: tests/test_private.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

_LARGEST = 2**40


@contextmanager
def sizes_equated() -> Iterator[None]:
    """Meanwhile such a size may be a multiple of one without a bound.

    torch makes the latter's bound of the former's, 2**63 - 2, in floating numbers, which rounds it
    up: an AssertionError. What it is equated to is bounded before.
    """
    equate = ShapeEnv._set_replacement

    @wraps(equate)
    def equating(self: Any, symbol: Any, size: Any, *rest: Any) -> Any:
        known = self.var_to_range.get(symbol)
        if known is not None and not self.bound_sympy(size).issubset(known):
            for other in size.free_symbols:
                self._update_var_to_range(other, ValueRanges(-int_oo, _LARGEST))
        return equate(self, symbol, size, *rest)

    with patch.object(ShapeEnv, "_set_replacement", equating):
        yield
