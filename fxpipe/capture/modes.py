"""Train and eval mode, one of which tracing bakes into a graph, made inputs of it again.

`F.dropout(x, 0.1, True)` becomes `F.dropout(x, 0.1, self.training)`. Ops that only one mode runs
are marked with it, and `by_mode` picks the value that goes on. Which constants depend on the mode
and which the user wrote as such can't be seen in one graph: the model is traced once more in eval
mode, and the two are merged.
"""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.capture.dynamo import FlatModel
from fxpipe.capture.edit import Flags, Trace, form_of, kind_of, leaves_of, ops_of
from fxpipe.errors import FxpipeError
from fxpipe.ir import Op
from fxpipe.ops.constants import same
from fxpipe.ops.interpret import (
    DTYPE,
    HUNK,
    MODE,
    TRAINING,
    by_mode,
    limit,
    model_dtype,
    when_training,
)
from fxpipe.ops.regions import PLAIN, REGION
from fxpipe.runtime.leaves import in_mode, places, renumbered
from fxpipe.runtime.structure import Structure

_ATTENTION: object = torch._C._nn.scaled_dot_product_attention


def depends_on_mode(graph: fx.Graph, ops: Mapping[str, Op]) -> bool:
    """Whether an op, not of a stock module, could depend on the mode.

    So could each that draws random numbers or holds a flag. Its effect may be too small to be seen
    in the outputs: layers scaled by 1e-6 are common.
    """
    return any(
        node.target is _ATTENTION
        or (node.name in ops and ops[node.name].random)
        or any(leaf is True for leaf in leaves_of(node))
        for node in ops_of(graph)
        if node.op != "call_module"
    )


def merge_modes(
    graph: fx.Graph, model: FlatModel, tensors: Sequence[Tensor], trace: Trace
) -> tuple[dict[str, nn.Module], Structure]:
    """Rewrite `graph`, traced in train mode, in place so that it holds for eval mode too.

    `trace` gives the graph of the model as it is now, in eval mode, and the stock modules it calls,
    which are returned, with the structure of the outputs of both modes. Where it can't be traced
    so, `graph` stays as it is.
    """
    model.eval()
    try:
        twin, modules = trace(model, tensors)
    except (FxpipeError, RuntimeError):
        return {}, in_mode(model.outputs, training=True)
    return modules, _Merge(graph, twin, model_dtype(model)).run(model.outputs)


def forget_eval(graph: fx.Graph, outputs: Structure) -> Structure:
    """Leave in `graph`, in place, what train mode runs; gives its outputs' structure."""
    output, kept = graph.output_node(), in_mode(outputs, training=True)
    # Those of eval mode alone were added behind.
    output.args = (output.args[0][: 1 + max(places(kept), default=-1)],)  # type: ignore[index]
    for node in reversed(list(graph.nodes)):
        if node.target is by_mode:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.meta.pop(MODE, True) is False:
            graph.erase_node(node)
    return kept


class _Merge:
    """Walks both graphs; `mapped` gives the node of `graph` that holds a value of `twin`."""

    def __init__(self, graph: fx.Graph, twin: fx.Graph, own: torch.dtype) -> None:
        self.graph, self.twin, self.own = graph, twin, own
        self.flags = Flags(graph)
        given = [[n for n in g.nodes if n.op == "placeholder"] for g in (twin, graph)]
        self.mapped = dict(zip(*given, strict=True))
        self.last = given[1][-1]
        self.hunk = 0

    def _parts(self) -> Sequence[tuple[str, int, int, int, int]]:
        """Runs of ops that are equal or of one mode, as difflib's opcodes."""
        ours, theirs = (
            [(kind_of(n), form_of(n)) for n in ops_of(graph)] for graph in (self.graph, self.twin)
        )
        return SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()

    def run(self, outputs: Structure) -> Structure:
        """Pair equal ops; all that stands between two pairs is of one mode, or of the other.

        Gives `outputs` for both.
        """
        ours, theirs = ops_of(self.graph), ops_of(self.twin)
        training: list[fx.Node] = []
        evaluation: list[fx.Node] = []
        self.mapped.update(
            (n, self.flags.attribute(str(n.target))) for n in self.twin.nodes if n.op == "get_attr"
        )
        self.mapped.update(
            (n, self.flags.limit(str(n.args[1])))
            for n in self.twin.nodes
            if n.target is limit and "text" in n.meta
        )
        for tag, i1, i2, j1, j2 in self._parts():
            if tag != "equal":
                training += ours[i1:i2]
                evaluation += theirs[j1:j2]
                continue
            for node, twin in zip(ours[i1:i2], theirs[j1:j2], strict=True):
                if self._compatible(node, twin):
                    self._only(training, evaluation)
                    training, evaluation = [], []
                    self._pair(node, twin)
                else:
                    training.append(node)
                    evaluation.append(twin)
        self._only(training, evaluation)
        if "eval" in outputs:
            return {**outputs, "eval": renumbered(outputs["eval"], self._more_outputs())}
        self._join(self.graph.output_node(), self.twin.output_node())
        return outputs

    def _more_outputs(self) -> list[int]:
        """Add the outputs of eval mode to those of train mode; say where each is then."""
        outputs: list[fx.Node] = []
        fx.map_arg(self.graph.output_node().args, outputs.append)
        places: list[int] = []

        def add(twin: fx.Node) -> None:
            value = self.mapped[twin]
            if value not in outputs:
                outputs.append(value)
            places.append(outputs.index(value))

        fx.map_arg(self.twin.output_node().args, add)
        self.graph.output_node().args = (tuple(outputs),)
        return places

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
        places = iter(leaves_of(twin))

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
        node.meta[REGION] = user.meta.get(REGION, PLAIN)
        return node

    def _own_dtype(self, leaf: Any) -> Any:
        return self.flags.attribute(DTYPE) if leaf == self.own else leaf

    def _compatible(self, node: fx.Node, twin: fx.Node) -> bool:
        """Whether all constants that differ, of arguments of one form, can be opened."""
        return all(
            (isinstance(a, fx.Node) and (isinstance(b, fx.Node) or "text" in a.meta))
            or same(a, b)
            or (a is True and b is False)
            or (isinstance(a, float) and isinstance(b, float) and b == 0.0)
            for a, b in zip(leaves_of(node), leaves_of(twin), strict=True)
        )
