"""What ranks send each other, and all that stands in a rank's row beside its actions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fxpipe.runtime.portal import Wire
from fxpipe.schedule import Action

# What is sent to a rank goes to the thread that waits for it with as many bytes at once: to wake
# that thread takes as long as some small ops.
SENT_AT_ONCE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Message:
    """Something of micro-batch `microbatch`, from rank `source` to rank `target`.

    A "value" is for `stages`, which read it there; a "gradient" is the part of one of them; what is
    "random" is for the one of `stages` and has no wire. Stage n is the pipeline's end.
    """

    what: Literal["value", "gradient", "random"]
    wire: Wire | None
    stages: tuple[int, ...]
    microbatch: int
    source: int
    target: int

    @property
    def keys(self) -> list[tuple[str, Wire | None, int, int]]:
        """Under which a call has it, one for each stage."""
        return [(self.what, self.wire, j, self.microbatch) for j in self.stages]

    def __str__(self) -> str:
        name = "random numbers" if self.wire is None else f"{self.what} {self.wire.value}"
        return f"{name} of micro-batch {self.microbatch} from rank {self.source} to {self.target}"


@dataclass(frozen=True, slots=True)
class Send:
    """Begin to send; nothing is waited for."""

    message: Message


@dataclass(frozen=True, slots=True)
class Post:
    """Make room for it; it may come from now on."""

    message: Message


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Leave:
    """Wait until it has left."""

    message: Message

    def __str__(self) -> str:
        return f"a receive of {self.message}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Begin to add up over replicas the gradients that are whole once stage `stage` is done."""

    stage: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Begin to gather the parameters of stage `stage`, of which each replica holds a share."""

    stage: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """Wait for them."""

    stage: int

    def __str__(self) -> str:
        return f"the parameters of stage {self.stage}, which nothing gathers before"


@dataclass(frozen=True, slots=True)
class Free:
    """Let go of what was gathered for stage `stage`, as its `Reduce` does too."""

    stage: int


Item = Action | Send | Post | Receive | Leave | Reduce | Gather | Gathered | Free
Row = tuple[Item, ...]


def most_leaving(largest_bytes: int) -> int:
    """How much of what leaves for another rank waits at most, in bytes, as one action begins.

    That is of messages up to so large. What the action sends may come to it.
    """
    return max(SENT_AT_ONCE_BYTES, largest_bytes)


def arrivals(rows: Sequence[Row], rank: int) -> dict[int, list[Message]]:
    """By rank, what comes from there to `rank`, in order."""
    found: dict[int, list[Message]] = {}
    for source, row in enumerate(rows):
        for item in row:
            if isinstance(item, Send) and item.message.target == rank:
                found.setdefault(source, []).append(item.message)
    return found


def maker(rows: Sequence[Row], message: Message) -> Action:
    """The action whose result it is."""
    row = rows[message.source]
    before = row[: row.index(Send(message))]
    return next(item for item in reversed(before) if isinstance(item, Action))


def first_of(row: Row, m: int) -> Row:
    """What of the row is of the first m micro-batches, or of none."""

    def microbatch(item: Item) -> int:
        match item:
            case Action():
                return item.microbatch
            case Send(message) | Post(message) | Receive(message):
                return message.microbatch
        return 0

    return tuple(item for item in row if microbatch(item) < m)
