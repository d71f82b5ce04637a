"""Sizes, and comparisons of them, as arithmetic with named sizes."""

import re
from collections.abc import Mapping
from typing import Any

from fxpipe.errors import PackageError


def size(expression: str, values: Mapping[str, int]) -> int:
    """A size where the named sizes have these values. Raises PackageError."""
    return int(_evaluated(expression, values))


def holds(condition: str, values: Mapping[str, int]) -> bool:
    """Whether a comparison of sizes is met. Raises PackageError."""
    return bool(_evaluated(condition, values))


def _evaluated(expression: str, values: Mapping[str, int]) -> Any:
    known = {"__builtins__": {}, "max": max, "min": min, **values}
    try:
        if not re.fullmatch(r"[\w+*/%()<>=!, -]+", expression) or "__" in expression:
            raise ValueError("it is no arithmetic")
        return eval(expression, known)
    except (NameError, SyntaxError, TypeError, ValueError, ZeroDivisionError) as error:
        raise PackageError(
            f"{expression!r} is no size: write an expression in {', '.join(values)} ({error})"
        ) from error
