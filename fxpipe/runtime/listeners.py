"""Who waits for this process: told where something fails before any pipeline was called.

Until its closure calls one, a runner doesn't know which other processes come to the same call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet


class Listener(Protocol):
    """A pipeline over processes."""

    def tell(self, error: BaseException) -> None:
        """Let the other processes hear of it."""


LISTENERS: WeakSet[Listener] = WeakSet()


@contextmanager
def telling_all() -> Iterator[None]:
    """If the block fails, let all processes that this one has pipelines with hear of it."""
    try:
        yield
    except BaseException as error:
        for listener in list(LISTENERS):
            listener.tell(error)
        raise
