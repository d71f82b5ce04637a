"""What a lane waits for: values and gradients, in whatever order other lanes finish them."""

from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")


class StoppedError(Exception):
    """Another lane failed, or the caller gave up: what was waited for will not come."""


class Mailbox(Generic[Key]):
    """Deliveries to one lane. Any thread puts; only the lane's own takes."""

    __slots__ = ("_arrived", "_queue", "_stopped")

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Key, Any] | None] = SimpleQueue()
        self._arrived: dict[Key, Any] = {}
        self._stopped = False

    def put(self, key: Key, item: object) -> None:
        """Deliver `item`; each key is delivered once before it is taken."""
        self._queue.put((key, item))

    def take(self, key: Key) -> Any:
        """The item of `key`, which then belongs to the taker alone. Raises StoppedError."""
        while key not in self._arrived:
            message = self._queue.get()
            if message is None:
                raise StoppedError
            if message[0] == key:
                return message[1]
            self._arrived[message[0]] = message[1]
            # Else this frame would hold the last message's tensors while it waits for the next.
            del message
        return self._arrived.pop(key)

    def stop(self) -> None:
        """Wake the lane with StoppedError at its next wait or `check`."""
        self._stopped = True
        self._queue.put(None)

    def check(self) -> None:
        """Raise StoppedError if the lane shall not begin anything more."""
        if self._stopped:
            raise StoppedError


class Outbox(Generic[Key]):
    """What a lane has for other processes, until it is sent."""

    __slots__ = ("_items", "_left")

    def __init__(self) -> None:
        self._items: dict[Key, Any] = {}
        self._left: dict[Key, int] | None = None

    def expect(self, times: Mapping[Key, int]) -> None:
        """Each item will be taken so many `times`; others need not be kept."""
        self._left = dict(times)

    def put(self, key: Key, item: object) -> None:
        """Keep `item` until it is taken, once if nothing else is expected."""
        if self._left is None or key in self._left:
            self._items[key] = item

    def take(self, key: Key) -> Any:
        """The item of `key`, which is there."""
        if self._left is not None:
            self._left[key] -= 1
            if self._left[key]:
                return self._items[key]
        return self._items.pop(key)

    def stop(self) -> None:
        """Nobody waits here."""


class Mirror(Generic[Key]):
    """What is put here is for the lane of `own`, and for other processes."""

    __slots__ = ("_outbox", "_own")

    def __init__(self, own: Mailbox[Key], outbox: Outbox[Key]) -> None:
        self._own = own
        self._outbox = outbox

    def put(self, key: Key, item: object) -> None:
        """Deliver `item`, and keep it in the outbox if it is to be sent."""
        self._outbox.put(key, item)
        self._own.put(key, item)

    def take(self, key: Key) -> Any:
        """The item of `key`, as a mailbox gives it."""
        return self._own.take(key)

    def stop(self) -> None:
        """Wake the lane as a mailbox does."""
        self._own.stop()
