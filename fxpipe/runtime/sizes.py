"""Sizes, and comparisons of them, as arithmetic with named sizes."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from fxpipe.errors import PackageError

_FUNCTIONS = {"max": max, "min": min}
_WORDS = {*_FUNCTIONS, "and", "or", "not"}


def is_arithmetic(expression: str, names: Collection[str]) -> bool:
    """Whether it is computed from whole numbers and these sizes alone."""
    words = set(re.findall(r"\b[^\W\d]\w*", expression))
    return bool(re.fullmatch(r"[\w+*/%()<>=!, -]+", expression)) and words <= {*names, *_WORDS}


def size(expression: str, values: Mapping[str, int]) -> int:
    """A size where the named sizes have these values. Raises PackageError."""
    return int(_evaluated(expression, values))


def holds(condition: str, values: Mapping[str, int]) -> bool:
    """Whether a comparison of sizes is met. Raises PackageError."""
    return bool(_evaluated(condition, values))


def _evaluated(expression: str, values: Mapping[str, int]) -> Any:
    try:
        if not is_arithmetic(expression, values):
            raise ValueError("it is no arithmetic")
        return eval(expression, {"__builtins__": {}, **_FUNCTIONS, **values})
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError) as error:
        raise PackageError(
            f"{expression!r} is no size: write an expression in {', '.join(values)} ({error})"
        ) from error
