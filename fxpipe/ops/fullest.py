"""What a block needs at its fullest, by what its ops need one by one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from fxpipe.ir import OpCost
from fxpipe.ops.liveness import Needed


class Fullest(NamedTuple):
    """Bytes on top of what is saved up to the block: forward, backward, and in its two halves.

    The values `waiting` and the gradients of those `returning` are among it whatever op runs.
    """

    forward_bytes: int
    backward_bytes: int
    input_bytes: int
    weight_bytes: int
    waiting: frozenset[str]
    returning: frozenset[str]


def fullest(
    names: Sequence[str],
    costs: Sequence[OpCost],
    needed: Sequence[Needed],
    weights: Sequence[Mapping[str, int]],
    arriving: Sequence[int],
) -> Fullest:
    """That of the ops `names` in their order; `weights` are the bytes of those that each reads.

    While an op runs, those behind it have saved nothing yet, or it is gone again. Of a backward in
    halves it stays for the second, as do the gradients `arriving` at each op: on top of all these,
    an op needs less by what is yet to arrive at those before it.
    """
    readers = Counter(name for read in weights for name in read)
    forward, backward, halves = [0], [0], []
    for op, cost, read, behind in zip(needed, costs, weights, _behind(names, costs), strict=True):
        alone = sum(size for name, size in read.items() if readers[name] == 1)
        added = min(cost.added_bytes, alone)
        forward.append(op.forward_bytes - behind)
        backward.append(op.backward_bytes - added - cost.freed_bytes - behind)
        halves.append(_halves(cost, op, sum(read.values()), added))
    return Fullest(
        max(forward),
        max(backward),
        max(
            of_inputs - yet
            for (of_inputs, _), yet in zip(halves, accumulate(arriving, initial=0), strict=False)
        ),
        max(of_weights for _, of_weights in halves),
        # What only some of the ops find there may not be what is there at the fullest.
        frozenset.intersection(*(op.waiting for op in needed)),
        frozenset.intersection(*(op.returning for op in needed)),
    )


def _behind(names: Sequence[str], costs: Sequence[OpCost]) -> list[int]:
    """By op, what those behind it save first, of what the block makes."""
    places = [*range(len(costs))]
    first = {storage: k for k in reversed(places) for storage, _ in costs[k].saved}
    own = [
        sum(n for s, n in costs[k].saved if first[s] == k and s.partition("/")[0] in names)
        for k in places
    ]
    return [sum(own[k + 1 :]) for k in places]


def _halves(cost: OpCost, needed: Needed, weight_bytes: int, added: int) -> tuple[int, int]:
    """What an op needs in the first half of a backward and in the second.

    In the second no gradients are on their way; those of weights are as large as these, but for
    what is `added` to what is there.
    """
    backward = needed.backward_bytes
    if cost.arriving_bytes:
        return backward - weight_bytes, cost.backward_bytes - added
    return (0, backward) if cost.weight_gradient_ms else (backward, 0)
