"""A captured graph as straight code of torch.fx, with as little between its ops as a stage has."""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from fxpipe.ir import Capture
from fxpipe.ops.interpret import DTYPE, MODE, TRAINING, by_mode
from fxpipe.ops.regions import PLAIN, REGION, GraphSwitch


def straight(
    capture: Capture,
    modules: Mapping[str, nn.Module],
    state: Mapping[str, Tensor],
    device: torch.device,
) -> fx.GraphModule:
    """What `capture` runs in train mode on `device`, where modules, parameters and buffers are.

    It takes the model's inputs. It returns its outputs, with None for what eval mode alone has, and
    the first value that has a gradient.
    """
    constants = {TRAINING: True, DTYPE: capture.dtype}
    graph, values = fx.Graph(), dict[fx.Node, Any]()
    # By names that no attribute of a GraphModule has, such as `code`, and near at hand.
    held: dict[str, nn.Module | Tensor] = {}
    switch = GraphSwitch(graph)
    first = None

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in capture.graph.nodes:
        if node.op == "output":
            switch.to(PLAIN)
            graph.output((fx.map_arg(node.args[0], values.get), first))
        elif node.op == "get_attr" and node.target in constants:
            values[node] = constants[node.target]
        elif node.target is by_mode:
            values[node] = values[node.all_input_nodes[0]]
        elif node.meta.get(MODE, True):
            switch.to(node.meta.get(REGION, switch.region))
            arguments = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            args, kwargs = map_aggregate(arguments, moved)
            # A value that is called `self` would stand in the place of the GraphModule.
            name = f"made_{node.name}"
            values[node] = copied = graph.create_node(node.op, node.target, args, kwargs, name)
            if node.op in ("call_module", "get_attr"):
                copied.target = f"held_{node.name}"
                held[copied.target] = (modules if node.op == "call_module" else state)[node.target]
            elif isinstance(node.target, MethodType):
                copied.target = _function(node.target)
            if first is None and node.name in capture.ops and node.name in capture.specs:
                first = copied if capture.specs[node.name].requires_grad else None
    return fx.GraphModule(held, graph)


def _function(method: MethodType) -> Callable[..., Any]:
    """A custom autograd.Function's `apply`: torch.fx would look for its name in torch's module."""
    return lambda *args, **kwargs: method(*args, **kwargs)
