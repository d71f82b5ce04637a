"""Tools for graphs that are compared: their ops, constants among arguments, and new inputs."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.capture.dynamo import FlatModel
from fxpipe.ops.interpret import DTYPE, TRAINING, limit
from fxpipe.ops.regions import PLAIN, REGION, Autocast

Trace = Callable[[FlatModel, Sequence[Tensor]], tuple[fx.Graph, dict[str, nn.Module]]]


class Flags:
    """Nodes of a graph for what it reads besides values: attributes, and texts made of them."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._attributes: dict[str, fx.Node] = {
            str(n.target): n for n in graph.nodes if n.op == "get_attr"
        }

    def attribute(self, name: str) -> fx.Node:
        """The node that reads `name`. It stands first, so that any op may use it."""
        if name not in self._attributes:
            self._attributes[name] = self._graph.get_attr(name)
            text = {TRAINING: "self.training", DTYPE: "dtype"}.get(name)
            self._attributes[name].meta.update({} if text is None else {"text": text})
        next(iter(self._graph.nodes)).prepend(self._attributes[name])
        return self._attributes[name]

    def limit(self, name: str) -> fx.Node:
        """The node that is this limit of the model's own dtype, for any op as well."""
        dtype, text = self.attribute(DTYPE), f"torch.finfo(dtype).{name}"
        for user in dtype.users:
            if user.meta.get("text") == text:
                return user
        first = next(node for node in self._graph.nodes if node.op.startswith("call_"))
        return self.call(limit, (dtype, name), text, first)

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], text: str, user: fx.Node
    ) -> fx.Node:
        """A node before `user` that computes a constant, written as `text`."""
        with self._graph.inserting_before(user):
            node: fx.Node = self._graph.call_function(function, args)
        node.meta["text"] = text
        return node


def ops_of(graph: fx.Graph) -> list[fx.Node]:
    """What was traced: all calls but those that stand for a text."""
    return [n for n in graph.nodes if n.op.startswith("call_") and "text" not in n.meta]


def kind_of(node: fx.Node) -> tuple[str, str, str, bool, tuple[Autocast, ...]]:
    """Equal for ops that may be the same one in two graphs."""
    region = node.meta.get(REGION, PLAIN)
    return node.op, str(node.target), node.meta.get("module", ""), region.grad, region.autocasts


def form_of(node: fx.Node) -> str:
    """How its arguments are nested, whatever they are: in `leaves_of` a slice is three of them."""
    return str(fx.node.map_aggregate((node.args, node.kwargs), lambda _: 0))


def leaves_of(node: fx.Node) -> list[Any]:
    """All arguments, in the order in which `map_aggregate` meets them."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return found
