"""What each op needs at its fullest besides what ops save: values and gradients that still wait.

Forward, a value that no backward keeps is there from its op to its last reader, or for as long as
the variable that it is assigned to; backward, a value's gradient from its last reader to its op
(returning.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fxpipe.ir import Capture, LossCost, OpCost
from fxpipe.ops.returning import gradient_spans
from fxpipe.ops.variables import held_until

# What is there at once of a loss that was not measured, in tensors like the output: one such as
# cross entropy has its logarithms, their gradient and the output's, and some keep the output too.
_LOSS_TENSORS = 4


class Needed(NamedTuple):
    """What an op needs on top of what is saved, as it runs and in a whole backward.

    Among it are the values `waiting`, of ops before, and the gradients of the values `returning`,
    which have no other views.
    """

    forward_bytes: int
    backward_bytes: int
    waiting: frozenset[str]
    returning: frozenset[str]


def workspaces(
    capture: Capture,
    costs: Mapping[str, OpCost],
    order: Sequence[str],
    value_bytes: Mapping[str, int],
    loss: LossCost | None = None,
) -> tuple[dict[str, Needed], int]:
    """For each op, in this order, and for the loss: bytes on top of what ops up to it have saved.

    `value_bytes` are those of each value. A result that leaves the model counts for the last op.
    """
    place = {name: k for k, name in enumerate(order)}
    end = len(order)
    # By storage, its views: what an op in place gives is the value that it wrote, by a later name.
    results = [capture.ops[name] for name in order]
    views = Counter(op.storage for op in results if op.storage not in op.mutates)
    latest = {op.storage: name for name, op in zip(order, results, strict=True)}
    made: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    gradients: dict[str, int] = {}
    trained: set[str] = set()
    nodes = {node.name: node for node in capture.graph.nodes}
    for k, name in enumerate(order):
        storage = capture.ops[name].storage
        if name in capture.specs and storage in place:
            spec = capture.specs[name]
            made.setdefault(storage, k)
            # A view that is expanded has no more memory; its gradient is as large as it looks.
            n_bytes = value_bytes[name]
            sizes[storage] = max(value_bytes.get(storage, n_bytes), sizes.get(storage, 0))
            gradients[storage] = max(n_bytes, gradients.get(storage, 0))
            trained |= {storage} if spec.requires_grad else set()
            users = (place[user.name] for user in nodes[name].users if user.name in place)
            readers.setdefault(storage, []).extend([k, *users])
    kept_from: dict[str, int] = {}
    for k, name in enumerate(order):
        for storage, _ in costs[name].saved if name in costs else ():
            kept_from.setdefault(storage, k)
    outputs = {capture.ops[name].storage for name in capture.outputs if name in place}
    held: dict[str, int] = {}
    for name, until in held_until(capture, order).items():
        storage = capture.ops[name].storage
        held[storage] = max(until, held.get(storage, until))
    waiting, returning = ([set[str]() for _ in order] for _ in range(2))
    for storage in sizes:
        until = end - 1 if storage in outputs else max(*readers[storage], held.get(storage, 0))
        for k in range(made[storage] + 1, min(until, kept_from.get(storage, end) - 1) + 1):
            waiting[k].add(storage)
    for storage, span in gradient_spans(capture, order, made, readers, trained).items():
        for k in span:
            returning[k].add(storage)
    needed: dict[str, Needed] = {}
    for k, name in enumerate(order):
        cost = costs.get(name, OpCost(0.0, 0.0))
        new = sum(b for s, b in cost.saved if kept_from[s] == k and made.get(s, k) == k)
        needed[name] = Needed(
            sum(sizes[storage] for storage in waiting[k]) + max(0, cost.workspace_bytes - new),
            sum(gradients[storage] for storage in returning[k]) + cost.backward_bytes,
            frozenset(waiting[k]),
            frozenset(latest[storage] for storage in returning[k] if views[storage] == 1),
        )
    result = [storage for storage in outputs & trained if storage in sizes]
    unused = loss.unused if loss else ()
    used = {capture.ops[name].storage for name in {*capture.outputs} - {*unused} if name in place}
    loss_bytes = loss.peak_bytes if loss else sum(sizes[s] * _LOSS_TENSORS for s in result)
    # Room for a result, and then for its gradient, is held apart, from the start of F; one that a
    # backward keeps is among what is saved or received besides. (Where that comes only as backward
    # computes it again, that moment is the fuller one.)
    loss_bytes -= sum(sizes[s] * (1 + (s in kept_from)) for s in result if s in used)
    # What the loss leaves unused is there besides, and given no gradient.
    loss_bytes += sum(sizes[s] for s in result if s not in used and s not in kept_from)
    return needed, max(0, loss_bytes)
