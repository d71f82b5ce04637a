"""When a rank waits until something that it has sent has left.

What is sent stays where it was made until the other rank has asked for it: the later that is, the
more of it. The plan counts so many bytes, `most_leaving`; with more, a rank waits before its next
action. It does where the other rank, by the plan, asks for it after an action that begins before
that next one: so no two wait for each other, whatever else they wait for.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from math import inf

from fxpipe.runtime.distributed.foreseen import Foreseen
from fxpipe.runtime.distributed.messages import (
    Item,
    Leave,
    Message,
    Post,
    Row,
    Send,
    most_leaving,
)
from fxpipe.schedule import Action


def with_leaves(
    rows: Sequence[Row], foreseen: Foreseen, n_bytes: Callable[[Message], int]
) -> tuple[Row, ...]:
    """The rows, which have their `Post`s, with a `Leave` wherever one is waited for.

    `n_bytes` are a message's.
    """
    asked = {
        item.message: begins
        for row in rows
        for item, begins in _since(row, foreseen)
        if isinstance(item, Post)
    }
    return tuple(tuple(_waiting(row, asked.__getitem__, foreseen, n_bytes)) for row in rows)


def _since(row: Row, foreseen: Foreseen) -> Iterator[tuple[Item, float]]:
    """Each item, with when the action before it begins."""
    begins = -inf
    for item in row:
        if isinstance(item, Action):
            begins = foreseen.comes.get(item, inf)
        yield item, begins


def _waiting(
    row: Row,
    asked: Callable[[Message], float],
    foreseen: Foreseen,
    n_bytes: Callable[[Message], int],
) -> Iterator[Item]:
    largest = Counter[int]()
    for item in row:
        if isinstance(item, Send):
            target = item.message.target
            largest[target] = max(largest[target], n_bytes(item.message))
    sent: dict[int, deque[Message]] = {target: deque() for target in largest}
    sent_bytes = Counter[int]()
    for item, begins in _since(row, foreseen):
        if isinstance(item, Action):
            for target, there in sent.items():
                last = None
                while sent_bytes[target] > most_leaving(largest[target]):
                    if asked(there[0]) >= begins:
                        break
                    last = there.popleft()
                    sent_bytes[target] -= n_bytes(last)
                if last is not None:  # what was sent before it leaves before it
                    yield Leave(last)
        elif isinstance(item, Send):
            sent[item.message.target].append(item.message)
            sent_bytes[item.message.target] += n_bytes(item.message)
        yield item
