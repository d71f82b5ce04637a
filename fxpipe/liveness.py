"""What each op needs at its fullest besides what ops save: values and gradients that still wait.

Forward, a value that no backward keeps is there from its op to its last reader; backward, a value's
gradient from its last reader to its op.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from fxpipe.ir import Capture, OpCost

# What is there at once of a loss that was not measured, in tensors like the output: one such as
# cross entropy has its logarithms, their gradient and the output's, and some keep the output too.
_LOSS_TENSORS = 4


class Needed(NamedTuple):
    """What an op needs on top of what is saved, as it runs and in a whole backward."""

    forward_bytes: int
    backward_bytes: int


def workspaces(
    capture: Capture,
    costs: Mapping[str, OpCost],
    order: Sequence[str],
    batch: int,
    loss_bytes: int | None = None,
) -> dict[str, Needed]:
    """For each op, in this order: bytes on top of what ops up to it have saved.

    A result that leaves the model counts for the last op. `loss_bytes` are there at once while the
    loss is taken, the results among them.
    """
    place = {name: k for k, name in enumerate(order)}
    end = len(order)
    made: dict[str, int] = {}
    last: dict[str, int] = {}
    sizes: dict[str, int] = {}
    trained: set[str] = set()
    nodes = {node.name: node for node in capture.graph.nodes}
    for k, name in enumerate(order):
        storage = capture.ops[name].storage
        if name in capture.specs and storage in place:
            spec = capture.specs[name]
            made.setdefault(storage, k)
            n_bytes = spec.bytes({**capture.sizes, "batch": batch})
            sizes[storage] = max(n_bytes, sizes.get(storage, 0))
            trained |= {storage} if spec.requires_grad else set()
            readers = [place[user.name] for user in nodes[name].users if user.name in place]
            last[storage] = max([k, last.get(storage, k), *readers])
    kept_from: dict[str, int] = {}
    for k, name in enumerate(order):
        for storage, _ in costs[name].saved if name in costs else ():
            kept_from.setdefault(storage, k)
    outputs = {capture.ops[name].storage for name in capture.outputs if name in place}
    waits, gradients = [0] * (end + 1), [0] * (end + 1)
    for storage, size in sizes.items():
        until = end - 1 if storage in outputs else last[storage]
        _add(waits, made[storage] + 1, min(until, kept_from.get(storage, end) - 1), size)
        if storage in trained:
            _add(gradients, made[storage], last[storage] - 1, size)
    needed: dict[str, Needed] = {}
    both = zip(order, accumulate(waits), accumulate(gradients), strict=False)
    for k, (name, waiting, arriving) in enumerate(both):
        cost = costs.get(name, OpCost(0.0, 0.0))
        new = sum(b for s, b in cost.saved if kept_from[s] == k and made.get(s, k) == k)
        forward = waiting + max(0, cost.workspace_bytes - new)
        needed[name] = Needed(forward, arriving + cost.backward_bytes)
    result = [storage for storage in outputs & trained if storage in sizes]
    if loss_bytes is None:
        loss_bytes = sum(sizes[storage] * _LOSS_TENSORS for storage in result)
    final = capture.ops[order[-1]].storage
    if final in result:
        # Room for a result, and then for its gradient, is held apart, from the start of F; one that
        # a backward keeps is among what is saved besides. (Where that comes only as backward
        # computes it again, that moment is the fuller one.) Others may be of earlier stages.
        loss_bytes -= sizes[final] * (1 + (final in kept_from))
    last_op = needed[order[-1]]
    needed[order[-1]] = last_op._replace(forward_bytes=max(last_op.forward_bytes, loss_bytes))
    return needed


def _add(steps: list[int], first: int, final: int, size: int) -> None:
    """Let the sums of `steps` have `size` more from place `first` to `final`."""
    if first <= final:
        steps[first] += size
        steps[final + 1] -= size
