"""When in its row a rank adds up a stage's gradients over the replicas.

As soon as the stage's last backward is done, whole or the half for weights: nothing is added to
them any more, and the rest of the row runs meanwhile. The stages' order is that of the whole table,
so that a replica with fewer micro-batches reduces in the same one.
"""

from collections.abc import Sequence
from itertools import accumulate

from fxpipe.runtime.distributed.messages import Item, Reduce, Row, Send
from fxpipe.schedule import Action, Kind


def reduction_order(row: Sequence[Action]) -> list[int]:
    """The stages of a rank's row of the table, as they end their backwards."""
    ends = {a.stage: place for place, a in enumerate(row) if a.kind is not Kind.FORWARD}
    return sorted(ends, key=ends.__getitem__)


def with_reductions(row: Row, order: Sequence[int]) -> Row:
    """The row with a `Reduce` for each stage of `order`, in that order."""
    ends = {item.stage: place for place, item in enumerate(row) if isinstance(item, Action)}
    following = [after_sends(row, ends[stage]) for stage in order]
    places = list(accumulate(following, max))
    found: list[Item] = []
    for place in range(len(row) + 1):
        found += [Reduce(stage) for stage, at in zip(order, places, strict=True) if at == place]
        found += row[place : place + 1]
    return tuple(found)


def after_sends(row: Row, place: int) -> int:
    """The place after that of an action and what it sends, which other ranks wait for."""
    place += 1
    while place < len(row) and isinstance(row[place], Send):
        place += 1
    return place
