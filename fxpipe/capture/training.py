"""Train and eval mode, which tracing bakes into functional calls, made an input of the graph.

`F.dropout(x, 0.1, True)` becomes `F.dropout(x, 0.1, self.training)`, and the `dropout_p` of
attention `0.1 if self.training else 0.0`.
"""

import inspect

import torch
from torch import fx
from torch.fx.node import Target

from fxpipe.interpret import TRAINING

# Position of the flag in functions that have no Python signature.
_FLAG: dict[Target, int] = {
    torch.dropout: 2,
    torch.alpha_dropout: 2,
    torch.feature_dropout: 2,
    torch.feature_alpha_dropout: 2,
    torch.batch_norm: 5,
    torch.rrelu: 3,
}
_ATTENTION: Target = torch._C._nn.scaled_dot_product_attention


def when_training(training: bool, probability: float) -> float:
    """The dropout probability in force."""
    return probability if training else 0.0


def free_training_flags(graph: fx.Graph) -> None:
    """Rewrite `graph` in place so that it reads the `get_attr` node `training`."""
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        flag = graph.get_attr(TRAINING)
    flag.meta["text"] = "self.training"
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _ATTENTION:
            _free_attention(graph, node, flag)
        for place, name in _flags(node.target):
            if len(node.args) > place and node.args[place] is True:
                node.update_arg(place, flag)
            elif node.kwargs.get(name) is True:
                node.update_kwarg(name, flag)
    if not flag.users:
        graph.erase_node(flag)


def _free_attention(graph: fx.Graph, node: fx.Node, flag: fx.Node) -> None:
    by_place = len(node.args) > 4
    probability = node.args[4] if by_place else node.kwargs.get("dropout_p", 0.0)
    if not isinstance(probability, float) or probability == 0.0:
        return
    with graph.inserting_before(node):
        freed = graph.call_function(when_training, (flag, probability))
    freed.meta["text"] = f"{probability!r} if self.training else 0.0"
    if by_place:
        node.update_arg(4, freed)
    else:
        node.update_kwarg("dropout_p", freed)


def _flags(target: Target) -> list[tuple[int, str]]:
    if target in _FLAG:
        return [(_FLAG[target], "train")]
    module = getattr(target, "__module__", None)
    if module != "torch.nn.functional":
        return []
    try:
        names = list(inspect.signature(target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []
    return [(names.index(TRAINING), TRAINING)] if TRAINING in names else []
