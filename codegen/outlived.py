"""Variables that are deleted: the parts of what was joined, if nothing keeps them any more.

A method's variables hold their values until it returns. Mostly the next line of the user's binds
the name anew, or a backward keeps the value anyway. The parts of a `torch.cat` are another case:
they are as large as the result, and no backward of its own keeps them.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from fxpipe.interpret import MODE
from fxpipe.ir import Capture, Profile
from fxpipe.regions import REGION
from fxpipe.variables import JOINS

# The key of a node's meta that says that its result is memory of its own, which no backward keeps.
GIVEN_UP = "given up"


def mark(capture: Capture, profile: Profile) -> None:
    """Say of each op in its node's meta whether its result is given up."""
    kept = {storage for cost in profile.costs.values() for storage, _ in cost.saved}
    for node in capture.graph.nodes:
        op, spec = capture.ops.get(node.name), capture.specs.get(node.name)
        own = op is not None and op.storage == node.name and node.name not in kept
        node.meta[GIVEN_UP] = own and spec is not None and 0 not in spec.shape


def outlived(
    node: fx.Node, nodes: Sequence[fx.Node], names: Mapping[str, str], outputs: Collection[str]
) -> list[fx.Node]:
    """The values that `node` joins whose variables would hold them through the rest of `nodes`."""
    if node.target not in JOINS or node is nodes[-1]:
        return []
    after = nodes[nodes.index(node) + 1 :]
    read = {*outputs, *(value.name for later in after for value in later.all_input_nodes)}
    bound = {names.get(later.name) for later in (node, *after)}
    return [
        value
        for value in node.all_input_nodes
        if value.meta.get(GIVEN_UP)
        and value.name not in read
        and names[value.name] not in bound
        and all(value.meta.get(key) == node.meta.get(key) for key in (MODE, REGION))
    ]
