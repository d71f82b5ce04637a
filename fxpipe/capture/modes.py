"""Train and eval mode, and dtype, which tracing bakes into a graph, made inputs of it again.

`F.dropout(x, 0.1, True)` becomes `F.dropout(x, 0.1, self.training)`, and `x.to(torch.float32)`,
where it was `x.to(y.dtype)`, `x.to(dtype)`. Ops that only one mode runs are marked with it, and
`by_mode` picks the value that goes on. Which constants depend on the mode and which the user wrote
as such can't be seen in one graph: the model is traced once more, in eval mode and another
precision, and the two are merged.
"""

import copy
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.capture.dynamo import FlatModel
from fxpipe.errors import FxpipeError
from fxpipe.interpret import DTYPE, HUNK, MODE, TRAINING, by_mode, model_dtype, when_training

Trace = Callable[[FlatModel, Sequence[Tensor]], tuple[fx.Graph, dict[str, nn.Module]]]
_ATTENTION: object = torch._C._nn.scaled_dot_product_attention


def depends_on_mode(graph: fx.Graph, own: torch.dtype) -> bool:
    """Whether an op, not of a stock module, holds a constant that could depend on the mode."""
    for node in _ops(graph):
        leaves = _leaves(node)
        if node.op != "call_module" and (
            own in leaves or any(leaf is True for leaf in leaves) or node.target is _ATTENTION
        ):
            return True
    return False


def merge_modes(
    graph: fx.Graph, model: FlatModel, tensors: Sequence[Tensor], trace: Trace
) -> dict[str, nn.Module]:
    """Rewrite `graph`, traced in train mode, in place so that it holds for both modes.

    `trace` gives the graph of a copy of the model, and the stock modules it calls. Returns those
    that only eval mode calls. Where the model can't be traced in eval mode, `graph` only gets its
    dtypes opened; where not in another precision either, it stays as it is.
    """
    own = model_dtype(model)
    other = torch.float32 if own == torch.float64 else torch.float64
    wider = [tensor.to(other) if tensor.is_floating_point() else tensor for tensor in tensors]

    def twin(training: bool) -> tuple[_Merge | None, dict[str, nn.Module]]:
        try:
            found, modules = trace(copy.deepcopy(model).to(other).train(training), wider)
        except (FxpipeError, RuntimeError):
            return None, {}
        return _Merge(graph, found, own, other), modules

    evaluation, modules = twin(training=False)
    if evaluation is None or evaluation.leaves_dtypes():
        training, _ = twin(training=True)
        if training is not None:
            training.run()
    if evaluation is not None:
        evaluation.run()
    return {path: model.model.get_submodule(path) for path in modules}


class _Merge:
    """Walks both graphs; `mapped` gives the node of `graph` that holds a value of `twin`."""

    def __init__(
        self, graph: fx.Graph, twin: fx.Graph, own: torch.dtype, other: torch.dtype
    ) -> None:
        self.graph, self.twin, self.own, self.other = graph, twin, own, other
        self.attributes: dict[str, fx.Node] = {
            str(n.target): n for n in graph.nodes if n.op == "get_attr"
        }
        given = [[n for n in g.nodes if n.op == "placeholder"] for g in (twin, graph)]
        self.mapped = dict(zip(*given, strict=True))
        self.last = given[1][-1]
        self.hunk = 0

    def _parts(self) -> Sequence[tuple[str, int, int, int, int]]:
        """Runs of ops that are equal or of one mode, as difflib's opcodes."""
        ours, theirs = ([_key(n) for n in _ops(graph)] for graph in (self.graph, self.twin))
        return SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()

    def leaves_dtypes(self) -> bool:
        """Whether an op that the twin lacks holds the model's dtype."""
        ours = _ops(self.graph)
        return any(
            self.own in _leaves(node)
            for tag, start, end, *_ in self._parts()
            for node in ours[start:end]
            if tag != "equal"
        )

    def run(self) -> None:
        """Pair equal ops; what stands between is of one mode."""
        ours, theirs = _ops(self.graph), _ops(self.twin)
        self.mapped.update(
            (n, self._attribute(str(n.target))) for n in self.twin.nodes if n.op == "get_attr"
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
        for name in (TRAINING, DTYPE):
            flag = self.attributes.get(name)
            if flag is not None and not flag.users:
                self.graph.erase_node(flag)

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
            value = twin.meta.get("val")
            if isinstance(value, Tensor) and value.dtype == self.other:
                node.meta["val"] = value.to(self.own)
            self.mapped[twin] = self.last = node

    def _pair(self, node: fx.Node, twin: fx.Node) -> None:
        self._join(node, twin)
        self.mapped[twin] = self.last = node

    def _join(self, node: fx.Node, twin: fx.Node) -> None:
        """Open what differs between the arguments of the two."""
        places = iter(_leaves(twin))

        def opened(leaf: Any) -> Any:
            theirs = next(places)
            if isinstance(leaf, fx.Node) and theirs != self.other:
                return self._either(leaf, self.mapped[theirs], node)
            if leaf == self.own and theirs == self.other:
                return self._attribute(DTYPE)
            if leaf is True and theirs is False:
                return self._attribute(TRAINING)
            if isinstance(leaf, float) and leaf != theirs == 0.0:
                return self._when_training(leaf, node)
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

    def _when_training(self, probability: float, user: fx.Node) -> fx.Node:
        flag = self._attribute(TRAINING)
        with self.graph.inserting_before(user):
            node = self.graph.call_function(when_training, (flag, probability))
        node.meta["text"] = f"{probability!r} if self.training else 0.0"
        return node

    def _attribute(self, name: str) -> fx.Node:
        if name not in self.attributes:
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                self.attributes[name] = self.graph.get_attr(name)
            text = {TRAINING: "self.training", DTYPE: "dtype"}.get(name)
            self.attributes[name].meta.update({} if text is None else {"text": text})
        return self.attributes[name]

    def _own_dtype(self, leaf: Any) -> Any:
        return self._attribute(DTYPE) if leaf == self.other else leaf

    def _compatible(self, node: fx.Node, twin: fx.Node) -> bool:
        """Whether all constants that differ are ones that can be opened."""
        ours, theirs = _leaves(node), _leaves(twin)
        return len(ours) == len(theirs) and all(
            (isinstance(a, fx.Node) and isinstance(b, fx.Node))
            or (type(a) is type(b) and a == b)
            or (a == self.own and b == self.other)
            or (a is True and b is False)
            or (isinstance(a, float) and isinstance(b, float) and b == 0.0)
            for a, b in zip(ours, theirs, strict=True)
        )


def _ops(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op.startswith("call_")]


def _key(node: fx.Node) -> tuple[str, str, str]:
    return node.op, str(node.target), node.meta.get("module", "")


def _leaves(node: fx.Node) -> list[Any]:
    """All arguments, in the order in which `map_aggregate` meets them."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return found
