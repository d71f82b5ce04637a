"""Train and eval mode, and dtype, which tracing bakes into a graph, made inputs of it again.

`F.dropout(x, 0.1, True)` becomes `F.dropout(x, 0.1, self.training)`, and `x.to(torch.float32)`,
where it was `x.to(y.dtype)`, `x.to(dtype)`. Ops that only one mode runs are marked with it, and
`by_mode` picks the value that goes on. Which constants depend on mode or dtype and which the user
wrote as such can't be seen in one graph: the model is traced once more in another precision, and
once more in eval mode, and what differs is told apart by its cause.
"""

import copy
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.capture.dynamo import FlatModel
from fxpipe.errors import FxpipeError
from fxpipe.interpret import (
    DTYPE,
    HUNK,
    MODE,
    TRAINING,
    by_mode,
    limit,
    model_dtype,
    when_training,
)

Trace = Callable[[FlatModel, Sequence[Tensor]], tuple[fx.Graph, dict[str, nn.Module]]]
_ATTENTION: object = torch._C._nn.scaled_dot_product_attention
_LIMITS = ("min", "max", "eps", "tiny")


def depends_on_mode(graph: fx.Graph) -> bool:
    """Whether an op, not of a stock module, holds a constant that could depend on the mode."""
    return any(
        node.target is _ATTENTION or any(leaf is True for leaf in _leaves(node))
        for node in _ops(graph)
        if node.op != "call_module"
    )


def open_dtypes(graph: fx.Graph, model: FlatModel, tensors: Sequence[Tensor], trace: Trace) -> None:
    """Rewrite `graph` in place so that it reads the model's dtype where it means it.

    `trace` gives the graph of a copy of the model in another precision. It is saved where no op
    holds the model's dtype, or a limit of it. Where that copy runs other ops, or can't be traced,
    those stay as they are.
    """
    own = model_dtype(model)
    limits = {getattr(torch.finfo(own), name) for name in _LIMITS}
    held = {leaf for node in _ops(graph) for leaf in _leaves(node) if type(leaf) is not slice}
    if own not in held and not limits & {leaf for leaf in held if isinstance(leaf, float)}:
        return
    other = torch.float32 if own == torch.float64 else torch.float64
    wider = [tensor.to(other) if tensor.is_floating_point() else tensor for tensor in tensors]
    try:
        twin, _ = trace(copy.deepcopy(model).to(other), wider)
    except (FxpipeError, RuntimeError):
        return
    if [*map(_key, _ops(graph))] != [*map(_key, _ops(twin))]:
        return
    flags = _Flags(graph)
    for node, theirs in zip(_ops(graph), _ops(twin), strict=True):
        places = iter(_leaves(theirs))

        def opened(leaf: Any, node: fx.Node = node, places: Any = places) -> Any:
            twin = next(places)
            if leaf == own and twin == other:
                return flags.attribute(DTYPE)
            if isinstance(leaf, float) and leaf != twin:
                for name in _LIMITS:
                    if (leaf, twin) == tuple(getattr(torch.finfo(d), name) for d in (own, other)):
                        text = f"torch.finfo(dtype).{name}"
                        return flags.call(limit, (flags.attribute(DTYPE), name), text, node)
            return leaf

        if len(_leaves(node)) == len(_leaves(theirs)):
            node.args = fx.node.map_aggregate(node.args, opened)
            node.kwargs = fx.node.map_aggregate(node.kwargs, opened)


def merge_modes(
    graph: fx.Graph, model: FlatModel, tensors: Sequence[Tensor], trace: Trace
) -> dict[str, nn.Module]:
    """Rewrite `graph`, traced in train mode, in place so that it holds for eval mode too.

    `trace` gives the graph of the model as it is now, in eval mode, and the stock modules it calls,
    which are returned. Where it can't be traced so, `graph` stays as it is.
    """
    model.eval()
    try:
        twin, modules = trace(model, tensors)
    except (FxpipeError, RuntimeError):
        return {}
    _Merge(graph, twin, model_dtype(model)).run()
    return modules


class _Flags:
    """Nodes of a graph for what it reads besides values: attributes, and texts made of them."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._attributes: dict[str, fx.Node] = {
            str(n.target): n for n in graph.nodes if n.op == "get_attr"
        }

    def attribute(self, name: str) -> fx.Node:
        """The node that reads `name`."""
        if name not in self._attributes:
            with self._graph.inserting_before(next(iter(self._graph.nodes))):
                self._attributes[name] = self._graph.get_attr(name)
            text = {TRAINING: "self.training", DTYPE: "dtype"}.get(name)
            self._attributes[name].meta.update({} if text is None else {"text": text})
        return self._attributes[name]

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], text: str, user: fx.Node
    ) -> fx.Node:
        """A node before `user` that computes a constant, written as `text`."""
        with self._graph.inserting_before(user):
            node: fx.Node = self._graph.call_function(function, args)
        node.meta["text"] = text
        return node


class _Merge:
    """Walks both graphs; `mapped` gives the node of `graph` that holds a value of `twin`."""

    def __init__(self, graph: fx.Graph, twin: fx.Graph, own: torch.dtype) -> None:
        self.graph, self.twin, self.own = graph, twin, own
        self.flags = _Flags(graph)
        given = [[n for n in g.nodes if n.op == "placeholder"] for g in (twin, graph)]
        self.mapped = dict(zip(*given, strict=True))
        self.last = given[1][-1]
        self.hunk = 0

    def _parts(self) -> Sequence[tuple[str, int, int, int, int]]:
        """Runs of ops that are equal or of one mode, as difflib's opcodes."""
        ours, theirs = ([_key(n) for n in _ops(graph)] for graph in (self.graph, self.twin))
        return SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()

    def run(self) -> None:
        """Pair equal ops; what stands between is of one mode."""
        ours, theirs = _ops(self.graph), _ops(self.twin)
        self.mapped.update(
            (n, self.flags.attribute(str(n.target))) for n in self.twin.nodes if n.op == "get_attr"
        )
        for tag, i1, i2, j1, j2 in self._parts():
            if tag == "equal":
                for node, twin in zip(ours[i1:i2], theirs[j1:j2], strict=True):
                    if self._compatible(node, twin):
                        self._pair(node, twin)
                    else:
                        self._only([node], [twin])
            else:
                self._only(ours[i1:i2], theirs[j1:j2])
        self._join(self.graph.output_node(), self.twin.output_node())

    def _only(self, ours: Sequence[fx.Node], theirs: Sequence[fx.Node]) -> None:
        """Ops of train mode, then those of eval mode, copied behind them."""
        self.hunk += 1
        for node in ours:
            node.meta |= {MODE: True, HUNK: self.hunk}
            self.last = node
        for twin in theirs:
            args, kwargs = fx.map_arg((twin.args, twin.kwargs), self.mapped.__getitem__)
            args, kwargs = fx.node.map_aggregate((args, kwargs), self._own_dtype)
            with self.graph.inserting_after(self.last):
                node = self.graph.create_node(twin.op, twin.target, args, kwargs, twin.name)
            node.meta = {**twin.meta, MODE: False, HUNK: self.hunk}
            self.mapped[twin] = self.last = node

    def _pair(self, node: fx.Node, twin: fx.Node) -> None:
        self._join(node, twin)
        self.mapped[twin] = self.last = node

    def _join(self, node: fx.Node, twin: fx.Node) -> None:
        """Open what differs between the arguments of the two."""
        places = iter(_leaves(twin))

        def opened(leaf: Any) -> Any:
            theirs = next(places)
            if isinstance(leaf, fx.Node) and isinstance(theirs, fx.Node):
                return self._either(leaf, self.mapped[theirs], node)
            if leaf is True and theirs is False:
                return self.flags.attribute(TRAINING)
            if isinstance(leaf, float) and leaf != theirs:
                text = f"{leaf!r} if self.training else 0.0"
                training = self.flags.attribute(TRAINING)
                return self.flags.call(when_training, (training, leaf), text, node)
            return leaf

        node.args = fx.node.map_aggregate(node.args, opened)
        node.kwargs = fx.node.map_aggregate(node.kwargs, opened)

    def _either(self, ours: fx.Node, theirs: fx.Node, user: fx.Node) -> fx.Node:
        """The value that `user` reads: one in train mode, another in eval mode."""
        if ours is theirs:
            return ours
        for reader in ours.users:
            if reader.target is by_mode and reader.args == (ours, theirs):
                return reader
        with self.graph.inserting_before(user):
            node = self.graph.create_node(
                "call_function", by_mode, (ours, theirs), {}, name=ours.name
            )
        node.meta = {**ours.meta, HUNK: ours.meta.get(HUNK, theirs.meta.get(HUNK))}
        node.meta.pop(MODE, None)
        node.meta.pop("text", None)
        return node

    def _own_dtype(self, leaf: Any) -> Any:
        return self.flags.attribute(DTYPE) if leaf == self.own else leaf

    def _compatible(self, node: fx.Node, twin: fx.Node) -> bool:
        """Whether all constants that differ are ones that can be opened."""
        ours, theirs = _leaves(node), _leaves(twin)
        return len(ours) == len(theirs) and all(
            (isinstance(a, fx.Node) and (isinstance(b, fx.Node) or "text" in a.meta))
            or (type(a) is type(b) and a == b)
            or (a is True and b is False)
            or (isinstance(a, float) and isinstance(b, float) and b == 0.0)
            for a, b in zip(ours, theirs, strict=True)
        )


def _ops(graph: fx.Graph) -> list[fx.Node]:
    """What was traced: all calls but those that stand for a text."""
    return [n for n in graph.nodes if n.op.startswith("call_") and "text" not in n.meta]


def _key(node: fx.Node) -> tuple[str, str, str]:
    return node.op, str(node.target), node.meta.get("module", "")


def _leaves(node: fx.Node) -> list[Any]:
    """All arguments, in the order in which `map_aggregate` meets them."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return found
