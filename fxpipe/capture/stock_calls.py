"""Calls of stock `torch.nn` modules: the ops that one made become one `call_module` node.

So an emitted stage says `self.conv1(x)`, and train and eval mode are the module's own affair.
"""

import operator
from collections.abc import Sequence
from itertools import groupby

from torch import Tensor, fx, nn

from fxpipe.ops.stock import constructor, forward_takes_one

_OUTPUT_PADDING = 5  # its place among the arguments of a transposed convolution


def call_stock_modules(graph: fx.Graph, model: nn.Module) -> dict[str, nn.Module]:
    """Rewrite `graph` in place; returns the modules it now calls, by path."""
    called: dict[str, nn.Module] = {}
    constructors: dict[str, str | None] = {}
    modules = dict(model.named_modules(remove_duplicate=False))  # by name, not as attributes
    fixed = _with_own_mode(model)
    ops = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    for _, run in groupby(ops, key=lambda node: (node.meta["module"], node.meta["call"])):
        group = list(run)
        path = group[0].meta["module"]
        module = modules[path]
        if path not in constructors:
            constructors[path] = None if module in fixed else constructor(module)
        ends = _ends(group, path) if _takes_one(module, group) else None
        if constructors[path] is not None and path and ends is not None:
            given, result = ends
            with graph.inserting_before(result):
                call = graph.call_module(path, (given,))
            call.meta = result.meta
            result.replace_all_uses_with(call)
            for node in reversed(group):
                graph.erase_node(node)
            call.name = result.name  # the user's own, free again
            called[path] = module
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return called


def _with_own_mode(model: nn.Module) -> set[nn.Module]:
    """Modules that stay in train or eval mode whatever `model` is in, as frozen batch norms do."""
    before = [(module, module.training) for module in model.modules()]
    found: set[nn.Module] = set()
    for mode in (True, False):
        model.train(mode)
        found.update(module for module in model.modules() if module.training != model.training)
    for module, mode in before:
        module.training = mode
    return found


def _takes_one(module: nn.Module, group: Sequence[fx.Node]) -> bool:
    """Whether a call that made these ops can only have been `module(x)`.

    Transposed convolutions take an `output_size`, which changes nothing but their padding.
    """
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        given = group[-1].args
        return len(given) > _OUTPUT_PADDING and given[_OUTPUT_PADDING] == module.output_padding
    # What else a bag of embeddings takes are values, which would be a second one that goes in.
    return isinstance(module, nn.EmbeddingBag) or forward_takes_one(module)


def _ends(group: Sequence[fx.Node], path: str) -> tuple[fx.Node, fx.Node] | None:
    """The one value that goes into a module's ops and the one that comes out, if it is so.

    An item that alone is used of a tuple is not what the module returns.
    """
    inside = set(group)
    given = {
        value
        for node in group
        for value in node.all_input_nodes
        if value not in inside and not (value.op == "get_attr" and _belongs(value, path))
    }
    results = {node for node in group if any(user not in inside for user in node.users)}
    if len(given) != 1 or len(results) != 1:
        return None
    result = results.pop()
    return None if _is_of_tuple(result) else (given.pop(), result)


def _is_of_tuple(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    return not isinstance(node.all_input_nodes[0].meta.get("val"), Tensor)


def _belongs(attribute: fx.Node, path: str) -> bool:
    return str(attribute.target).rpartition(".")[0] == path
