"""When a rank posts its receives: as early as the plan's memory allows.

A posted receive is a buffer, and what is sent to a rank that has not posted one waits where it was
made. So receives are posted while the rank holds no more with their buffers than at its fullest
anyway and what the plan sets aside for them. At its fullest it holds what its stages keep and need
while they compute, and the messages that have come before they are needed (foreseen.py).

To post one wakes the other rank, which takes as long as some small ops; to post several at once
wakes it once.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from fxpipe.runtime.distributed.foreseen import Foreseen
from fxpipe.runtime.distributed.messages import Item, Message, Post, Receive, Row, Send, arrivals
from fxpipe.schedule import Action

_FEW = 2  # when no more than one is posted of what comes from a rank, all that have room are


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A message's, from before action `due` of its rank's row, or earlier, until action `end`.

    It is foreseen that the message has come by action `here`.
    """

    message: Message
    n_bytes: int
    here: int
    due: int
    end: int


@dataclass(eq=False, slots=True)
class _Source:
    """What comes from one rank: what is `left` to post, and when what is posted is `due`."""

    left: deque[_Buffer]
    due: list[int] = field(default_factory=list)

    def ahead(self, k: int) -> int:
        """How many are posted that action k or a later one needs."""
        return sum(due >= k for due in self.due)

    def post(self) -> _Buffer:
        """The next one."""
        self.due.append(self.left[0].due)
        return self.left.popleft()


def with_posts(
    rows: Sequence[Row],
    foreseen: Foreseen,
    held: Sequence[Sequence[float]],
    ahead_bytes: Sequence[int],
    n_bytes: Callable[[Message], int],
) -> tuple[Row, ...]:
    """The rows of a table with a `Post` for each `Receive`, both in the order of what comes.

    `held` are the bytes that each rank's stages hold during each of its actions, with the values
    that this one and those before it have received; `ahead_bytes` are set aside on each rank for
    what is posted; `n_bytes` are a message's.
    """
    comes = dict(_comes(rows, foreseen))
    found = []
    for rank, row in enumerate(rows):
        arriving = arrivals(rows, rank)
        ordered = tuple(_in_order(row, arriving))
        needed = dict(_needed(ordered))
        ends = [foreseen.ends.get(item, inf) for item in row if isinstance(item, Action)]
        queues = [
            deque(_buffer(m, n_bytes(m), needed[m], ends, comes[m]) for m in messages)
            for messages in arriving.values()
        ]
        spare = None if foreseen.spare_bytes is None else foreseen.spare_bytes[rank]
        found.append(_placed(ordered, _posts(queues, held[rank], ahead_bytes[rank], spare)))
    return tuple(found)


def _in_order(row: Row, arriving: Mapping[int, Sequence[Message]]) -> Iterator[Item]:
    """The row that receives what comes from a rank in the order in which it comes."""
    left = {source: deque(messages) for source, messages in arriving.items()}
    for item in row:
        if isinstance(item, Receive):
            queue = left[item.message.source]
            while item.message in queue:
                yield Receive(queue.popleft())
        else:
            yield item


def _needed(row: Row) -> Iterator[tuple[Message, int]]:
    """By message, the place of the action before which it is received."""
    place = 0
    for item in row:
        place += isinstance(item, Action)
        if isinstance(item, Receive):
            yield item.message, place


def _comes(rows: Sequence[Row], foreseen: Foreseen) -> Iterator[tuple[Message, float]]:
    """By message, when it comes."""
    for row in rows:
        comes = -inf
        for item in row:
            if isinstance(item, Action):
                comes = foreseen.comes.get(item, inf)
            elif isinstance(item, Send):
                yield item.message, comes


def _buffer(
    message: Message, n_bytes: int, due: int, ends: Sequence[float], comes: float
) -> _Buffer:
    """The message's; `ends` are those of its rank's actions."""
    here = next((k for k, end in enumerate(ends) if end > comes), len(ends))
    # A gradient is there until its backward is done; a value is counted where it is kept.
    end = due + (message.what == "gradient")
    return _Buffer(message, n_bytes, min(here, due), due, end)


def _posts(
    queues: Sequence[deque[_Buffer]],
    held: Sequence[float],
    ahead_bytes: int,
    spare_bytes: Sequence[int] | None,
) -> list[list[Message]]:
    """What is posted before each action, and after the last."""
    load = [*held, 0.0]
    full = list(load)
    for buffer in (buffer for queue in queues for buffer in queue):
        for k in range(buffer.here, buffer.end):
            full[k] += buffer.n_bytes
            load[k] += buffer.n_bytes if k >= buffer.due else 0
    if spare_bytes is None:
        most = [max(full) + ahead_bytes] * len(full)
    else:
        rooms = (n_bytes + ahead_bytes for n_bytes in (*spare_bytes, 0))
        most = [n_bytes + room for n_bytes, room in zip(full, rooms, strict=True)]

    def fits(buffer: _Buffer, k: int) -> bool:
        return all(load[j] + buffer.n_bytes <= most[j] for j in range(k, buffer.due))

    sources = [_Source(queue) for queue in queues]
    found: list[list[Message]] = [[] for _ in load]
    for k, posted in enumerate(found):
        if k == 0 and not any(source.left[0].due == 0 for source in sources):
            continue  # what waits for no other rank begins before it is known that all agree
        few = [source for source in sources if source.ahead(k) < _FEW]
        while ready := [
            source
            for source in sources
            if source.left
            and (source.left[0].due <= k or (source in few and fits(source.left[0], k)))
        ]:
            buffer = min(ready, key=lambda source: source.left[0].due).post()
            posted.append(buffer.message)
            for there in range(k, buffer.due):
                load[there] += buffer.n_bytes
    return found


def _placed(row: Row, posts: Sequence[Sequence[Message]]) -> Row:
    """The row with what is posted before each action, before it waits for anything."""
    found: list[Item] = []
    left = iter(posts)
    posted = False  # for the next action
    for item in row:
        if not posted and not isinstance(item, Send):
            found += map(Post, next(left))
        posted = (posted or not isinstance(item, Send)) and not isinstance(item, Action)
        found.append(item)
    found += [Post(message) for messages in left for message in messages]
    return tuple(found)
