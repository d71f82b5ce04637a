"""Machine code for the planner's inner loops where numba is there, else the same loops in Python.

A plan is judged by simulating its step, and a search looks at tens of thousands of plans.
"""

from collections.abc import Callable
from typing import Any

try:
    from numba import njit
except ImportError:  # as on machines that run packages but plan none

    def njit(*, cache: bool) -> Any:  # type: ignore[no-redef]
        """Leave functions as they are."""
        return lambda function: function


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, of numbers and arrays alone, as machine code, kept on disk between runs."""
    made: Callable[..., Any] = njit(cache=True)(function)
    return made
