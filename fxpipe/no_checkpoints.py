"""A model run without its own `torch.utils.checkpoint`, as it is captured.

What is computed again in backward writes its buffers again: batch norm counts each batch twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils import checkpoint


@contextmanager
def no_checkpoints() -> Iterator[None]:
    """Meanwhile `checkpoint` calls its function and nothing else.

    It may have been imported by name, so what it calls is exchanged, which is private to torch:
    tests/test_private.py.
    """
    with (
        patch.object(checkpoint, "CheckpointFunction", _Called),
        patch.object(checkpoint, "_checkpoint_without_reentrant_generator", _around),
    ):
        yield


class _Called:
    """Stands for the reentrant way."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return function(*args)


def _around(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """Stands for what the other way does before the call and behind it."""
    yield
