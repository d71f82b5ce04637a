"""For how long the gradients of values are there, on a backward's way through the ops.

A value's gradient is there from its last reader to its op. Of what joins values, as `torch.cat`
does, the gradients of the parts are views: that of the whole is there until the last of them has
been used, or added to what other readers of the part give.
"""

from collections.abc import Mapping, Sequence, Set

from fxpipe.ir import Capture
from fxpipe.ops.variables import JOINS


def gradient_spans(
    capture: Capture,
    order: Sequence[str],
    made: Mapping[str, int],
    readers: Mapping[str, Sequence[int]],
    trained: Set[str],
) -> dict[str, range]:
    """By storage: the places in `order` of the ops that run backward while its gradient is there.

    Of each of the `trained` storages, `made` is the place of the op that makes it, and `readers`
    are those of all that read it.
    """
    nodes = {node.name: node for node in capture.graph.nodes}
    storages = [capture.ops[name].storage for name in order]
    starts = {storage: made[storage] for storage in trained}
    ends = {storage: max(readers[storage], default=made[storage]) for storage in trained}
    for k, name in enumerate(order):
        # Those with further views are left alone: what crosses a cut is known by value.
        if nodes[name].target not in JOINS or name not in trained or storages.count(name) > 1:
            continue
        given = (node.name for node in nodes[name].all_input_nodes if node.name in capture.ops)
        for part in {capture.ops[one].storage for one in given} & trained:
            if ends[part] == k:
                others = [reader for reader in readers[part] if made[part] < reader < k]
                ends[part] = max(others, default=starts[part])
                starts[name] = min(starts[name], ends[part])
    return {storage: range(starts[storage], ends[storage]) for storage in trained}
