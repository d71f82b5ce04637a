"""Whether the rows of all ranks can run, each to its end."""

from collections.abc import Sequence

from fxpipe.errors import ScheduleError
from fxpipe.runtime.distributed.messages import (
    Free,
    Gather,
    Gathered,
    Item,
    Leave,
    Post,
    Receive,
    Reduce,
    Row,
    Send,
)


def check_messages(rows: Sequence[Row]) -> None:
    """Raise ScheduleError, with what each rank waits for, unless all rows run to their ends."""
    left = [list(reversed(row)) for row in rows]
    done: set[Item | None] = {None}
    moved = True
    while moved:
        moved = False
        for row in left:
            while row and _awaited(row[-1]) in done:
                item = row.pop()
                done.add(item)
                if isinstance(item, Free | Reduce):
                    done.discard(Gather(item.stage))
                moved = True
    stuck = [
        f"rank {rank} waits forever for {_told(row[-1])}" for rank, row in enumerate(left) if row
    ]
    if stuck:
        raise ScheduleError("\n  ".join(["the schedule table can't run:", *stuck]))


def _awaited(item: Item) -> Item | None:
    """What must be done before it."""
    match item:
        case Receive(message):
            return Send(message)
        case Leave(message):
            return Post(message)
        case Gathered(stage):
            return Gather(stage)
    return None


def _told(item: Item) -> str:
    return str(item.message if isinstance(item, Receive) else item)
