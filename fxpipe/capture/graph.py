"""Dynamo's graph under the model's own names, with its checkpoint regions opened."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Argument, Target

from fxpipe.capture.devices import device_of, make_on, name_devices, only_moves
from fxpipe.capture.dynamo import function_of
from fxpipe.capture.failures import numpy_arrays
from fxpipe.capture.formals import FORMALS, Formals, formals_of, hand_on
from fxpipe.capture.functions import Functions
from fxpipe.capture.names import ModelNames
from fxpipe.capture.refuse_ops import public, refuse_op
from fxpipe.capture.sources import source_of, statements_of, where
from fxpipe.errors import CaptureError
from fxpipe.ops.interpret import reads_dtype
from fxpipe.ops.regions import PLAIN, REGION, behind

_CHECKPOINT: Target = torch.ops.higher_order.tag_activation_checkpoint
_SKIPPED: tuple[Target, ...] = (
    torch._C._log_api_usage_once,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
)
# Dynamo's ops that read a size which depends on data, and what a tensor calls them.
_METHODS: dict[Target, str] = {
    torch.ops.aten.sym_size.int: "size",
    torch.ops.aten.sym_numel.default: "numel",
    torch.ops.aten.sym_stride.int: "stride",
}
# What Dynamo calls for `tensor.data`.
_DATA: Target = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


def own_graph(
    found: fx.Graph, names: ModelNames, inputs: Sequence[str], functions: Functions
) -> fx.Graph:
    """`found` anew: inputs called `inputs`, `get_attr` nodes by the model's names for its state.

    Each node's `meta` keeps `val` (its fake value; a `get_attr` has it in `fake`, and in `val` the
    real one), `module` (path of the module that called it), `call` (which call of which module),
    `stack` (path and call of each module that it is inside of, outermost first), `source` (the
    user's line), `frames` and `statements` (all of the user's lines that led to it, outermost
    first, and what else is known of them), `formals` (what the forwards call it that are given it)
    and `region` (its grad mode and autocast). `names.state` grows by the tensors that tracing
    itself made, `functions` by the custom ones that are called. Raises CaptureError for one that
    can't be copied.
    """
    builder = _Builder(names, functions)
    placeholders = [node for node in found.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, inputs, strict=True):
        builder.values[node] = builder.graph.placeholder(name)
        # An input that is never read has `val` alone.
        builder.values[node].meta["val"] = node.meta.get("example_value", node.meta.get("val"))
        hand_on(formals_of(node), builder.values[node])
    builder.device = device_of(builder.graph)
    result = builder.copy(found)
    builder.graph.output(tuple(builder.result(value) for value in result))
    builder.graph.lint()
    return builder.graph


class _Builder:
    """The graph being built, and what each node of the old one became.

    A tensor read from the model stays a tensor until an op reads it: only then is it known which
    module does, and so which of its names to use.
    """

    def __init__(self, names: ModelNames, functions: Functions) -> None:
        self.names = names
        self.functions = functions
        self.graph = fx.Graph()
        self.device = torch.device("cpu")  # on which the model runs
        self.values: dict[fx.Node, Any] = {}
        self.attributes: dict[str, fx.Node] = {}
        self.region = PLAIN
        self.fakes: dict[int, Tensor] = {}
        self.formals: dict[int, Formals] = {}

    def copy(self, found: fx.Graph) -> list[Any]:
        """Copy all ops of `found`; its placeholders are in `values`. Returns its outputs."""
        owner = found.owning_module
        assert owner is not None
        for node in found.nodes:
            if node.op == "output":
                return [self.values[value] for value in node.args[0]]
            if node.op == "get_attr":
                self.values[node] = _attribute(owner, str(node.target))
                self.fakes[id(self.values[node])] = node.meta.get("example_value")
                self.formals[id(self.values[node])] = formals_of(node)
            elif node.op != "placeholder" and node.target not in _SKIPPED:
                region = behind(node, self.region, self.device)
                if region is None:
                    self.values[node] = self._call(node)
                else:
                    self.region = region
        raise AssertionError("a graph ends in an output")

    def read(self, value: Any, module: str) -> Argument:
        """`value` as an argument of an op that `module` calls."""
        if not isinstance(value, Tensor):
            return value  # type: ignore[no-any-return]
        name = self.names.tensor(value, module)
        if value.grad_fn is not None:
            raise CaptureError(
                f"{name or 'a tensor'!r} was computed of parameters before forward, and gradients "
                "go through it: compute it in forward"
            )
        if name is None:
            if isinstance(value, FakeTensor):  # Dynamo's, of an array whose values it leaves out
                raise CaptureError(numpy_arrays("an attribute is one"))
            name = f"constant_{len(self.attributes)}"
            self.names.add_constant(name, value)
        if name not in self.attributes:
            self.attributes[name] = self.graph.get_attr(name)
            self.attributes[name].meta |= {
                "val": value,
                "fake": self.fakes.get(id(value), value),
                FORMALS: self.formals.get(id(value), {}),
            }
        return self.attributes[name]

    def result(self, value: Any) -> Argument:
        """`value` as an output; one of the model's own tensors is copied, so that a stage has it.

        So an op of some stage makes each output but those that are inputs.
        """
        read = self.read(value, "")
        if not isinstance(value, Tensor):
            return read
        made = self.graph.call_method("clone", (read,))
        made.meta = {
            "val": value,
            "module": "",
            "call": "",
            "stack": (),
            "source": None,
            "frames": (),
            REGION: self.region,
        }
        return made

    def _call(self, node: fx.Node) -> Any:
        if node.target is _CHECKPOINT:
            return self._inline(node)
        name_devices(node)
        refuse_op(node)
        if node.op == "call_function" and isinstance(node.args[0] if node.args else None, fx.Node):
            container = self.values[node.args[0]]  # type: ignore[index]
            if isinstance(container, list):  # an item of an opened region's outputs
                return container[node.args[1]]  # type: ignore[index]
        if reads_dtype(node) and not node.users:
            return node.meta["example_value"]
        if only_moves(node):
            moved = self.values[node.args[0]]  # type: ignore[index]
            if isinstance(moved, fx.Node):
                hand_on(formals_of(node), moved)
                make_on(self.device, moved)
            return moved
        stack = self.names.paths(node.meta.get("nn_module_stack", {}))
        module, call = stack[-1] if stack else ("", "")

        def new(old: fx.Node) -> Argument:
            return self.read(self.values[old], module)

        args, kwargs = fx.map_arg(node.args, new), fx.map_arg(node.kwargs, new)
        op, target, name = node.op, node.target, node.name
        function = function_of(node)
        if function is not None:
            target = self._own(function, node).apply
        elif target in _METHODS:
            op, target = "call_method", _METHODS[target]
        elif target is _DATA:
            target, args, name = getattr, (*args, "data"), "data"
        elif isinstance(target, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
            target = public(target, node)
        if name.startswith(("child", "trampoline")):  # words of pytree's and of Dynamo's
            name = "output"
        made = self.graph.create_node(op, target, args, kwargs, name)
        made.meta = {
            "val": _fake(node, args),
            "module": module,
            "call": call,
            "stack": stack,
            "source": source_of(node),
            "frames": tuple(statement.source for statement in statements_of(node)),
            "statements": statements_of(node),
            FORMALS: formals_of(node),
            REGION: self.region,
        }
        return made

    def _own(
        self, function: type[torch.autograd.Function], node: fx.Node
    ) -> type[torch.autograd.Function]:
        try:
            return self.functions.own(function)
        except CaptureError as error:
            raise CaptureError(f"{error}\nIt is called at {where(node)}") from error

    def _inline(self, node: fx.Node) -> list[Any]:
        body, *arguments = (self.values[arg] for arg in node.args)  # type: ignore[index]
        placeholders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        self.values.update(zip(placeholders, arguments, strict=True))
        return self.copy(body.graph)


def _fake(node: fx.Node, args: Sequence[Any]) -> Any:
    """The node's fake value. Dynamo gives none to the items of a tensor that `tolist` reads."""
    found = node.meta.get("example_value")
    if found is None and node.target is operator.getitem and isinstance(args[0], fx.Node):
        found = args[0].meta["val"][args[1]]
    return found


def _attribute(owner: torch.nn.Module, target: str) -> Any:
    found: Any = owner
    for part in target.split("."):
        found = getattr(found, part)
    return found
