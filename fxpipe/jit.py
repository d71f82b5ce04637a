"""Machine code for the planner's inner loops where numba is there, else the same loops in Python.

A plan is judged by simulating its step, and a search looks at tens of thousands of plans.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    from numba import njit
except ImportError:  # as on machines that run packages but plan none

    def njit(**_: bool) -> Any:  # type: ignore[no-redef]
        """Leave functions as they are."""
        return lambda function: function


def _digest() -> str:
    sources = sorted((Path(__file__).parent / "passes").rglob("*_kernel.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


# Kernels call each other, but numba looks at a function's own file alone to see whether the code
# that it kept is old.
_DIGEST = _digest()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, of numbers and arrays alone, as machine code, kept on disk between runs.

    Threads run it side by side.
    """
    function.__qualname__ += f"_{_DIGEST}"
    made: Callable[..., Any] = njit(cache=True, nogil=True)(function)
    return made
