"""What tracing leaves that nobody would write: ops without effect, twice the same, out of place.

Only what holds for every input is changed: whatever some op writes into is left alone.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxpipe.capture.formals import FORMALS, hand_on
from fxpipe.ir import Op
from fxpipe.ops.gradients import ends_gradients
from fxpipe.ops.interpret import DTYPE, MODE, by_mode
from fxpipe.ops.regions import REGION
from fxpipe.ops.specs import tensor_spec
from fxpipe.runtime.backward import differentiable

CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "bool": torch.bool,
}
_RESHAPES = ("view", "reshape", "expand", "expand_as", "view_as", "reshape_as")
_BY_NUMBERS = (operator.add, torch.add, operator.mul, torch.mul, operator.sub, operator.truediv)
_WHOLE = (slice(None), slice(0, None), slice(0, None, 1), slice(None, None, 1), Ellipsis)


def simplify(graph: fx.Graph, ops: Mapping[str, Op]) -> bool:
    """Rewrite `graph` in place, given what its ops were seen to do; whether anything changed."""
    before = [node.name for node in graph.nodes]
    pure, settings = _Pure(graph, ops), _settings(graph)
    for node in list(graph.nodes):
        given = None if node in settings else _passes_on(node)
        if given is not None and pure(node) and all(map(_may_read_another, node.users)):
            later = "variable" in node.meta or named_by_user(node)
            if later and given.op.startswith("call_") and _takes_name(given):
                given.meta["variable"] = node.meta.get("variable", node.name)
            _replace(node, given)
    seen: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if pure(node) and _counts(node) and all(map(_may_read_another, node.users)):
            key = f"{node.target} {node.args} {node.kwargs} {node.meta['call']}"
            first = seen.setdefault(key, node)
            if first is not node:
                _replace(node, first)
    for node in reversed(list(graph.nodes)):
        after = _statement_goes_on(node)
        if after is not None and pure(node):
            after.prepend(node)
    return before != [node.name for node in graph.nodes]


def named_by_user(node: fx.Node) -> bool:
    """Whether the name of a value is that of a variable of the user's, as Dynamo gives it."""
    base = node.name.rstrip("0123456789").rstrip("_")
    known = {name for s in node.meta.get("statements", ()) for name in s.variables}
    return base != word_of(node) and (base in known or node.name in known)


def word_of(node: fx.Node) -> str:
    """What torch calls the op: `linear`, `view`, `add`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(name).strip("_").rpartition(".")[2]


class _Pure:
    """Whether an op could be left out or run elsewhere: it writes nothing and draws nothing, and
    nobody writes what it reads or makes.
    """

    def __init__(self, graph: fx.Graph, ops: Mapping[str, Op]) -> None:
        self._ops = ops
        self._written = {storage for op in ops.values() for storage in op.mutates}
        for node in graph.nodes:  # what eval mode alone does was not seen
            if node.meta.get(MODE) is False or node.target is by_mode:
                for used in node.all_input_nodes:
                    self._written.update(self._memories(used))

    def __call__(self, node: fx.Node) -> bool:
        op = self._ops.get(node.name)
        if op is None or op.random or op.mutates or MODE in node.meta:
            return False
        if node.op == "call_module" or not isinstance(node.meta.get("val"), Tensor):
            return False
        return self._kept(node) and all(map(self._kept, node.all_input_nodes))

    def _kept(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return "text" in node.meta or isinstance(node.meta.get("val"), nn.Parameter)
        return self._written.isdisjoint(self._memories(node))

    def _memories(self, node: fx.Node) -> tuple[str, ...]:
        op = self._ops.get(node.name)
        return (node.name,) if op is None else op.memories


def _settings(graph: fx.Graph) -> set[fx.Node]:
    """Ops by a number where their line, in another module, has another: the 1 in 1, 1/2, 1/3, ...

    Without one of those ops a module would not be like the others, of whose class it is.
    """
    found: dict[Any, dict[fx.Node, list[float]]] = {}
    times = Counter[Any]()
    for node in graph.nodes:
        numbers = [arg for arg in node.args if type(arg) in (int, float)]
        if node.target in _BY_NUMBERS and numbers and node.meta.get("frames"):
            line = (node.target, node.meta["frames"][-1], *map(type, numbers))
            module = node.meta["module"]
            found.setdefault((line, times[line, module]), {})[node] = numbers
            times[line, module] += 1
    differing = (alike for alike in found.values() if len({*map(tuple, alike.values())}) > 1)
    return {node for alike in differing for node in alike}


def _takes_name(node: fx.Node) -> bool:
    """Whether a value that the user gives a name only after an op without effect may have it."""
    return len(node.users) == 1 or not named_by_user(node)


def _replace(node: fx.Node, by: fx.Node) -> None:
    hand_on(node.meta.get(FORMALS, {}), by)
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _may_read_another(user: fx.Node) -> bool:
    return user.op != "output" and user.target is not by_mode


def _counts(node: fx.Node) -> bool:
    """Whether a value is of whole numbers, such as indices and masks, made by a rule."""
    value = node.meta.get("val")
    whole = isinstance(value, Tensor) and not differentiable(value)
    return whole and "empty" not in word_of(node) and "call" in node.meta


def _passes_on(node: fx.Node) -> fx.Node | None:
    """The operand that the result of `node` always equals, if there is one."""
    for operand in (*node.all_input_nodes, *_broadcast(node)):
        if _alike(node, operand) and _equals(node, operand):
            return operand
    return None


def _alike(node: fx.Node, operand: fx.Node) -> bool:
    mine, its = (n.meta.get("val") for n in (node, operand))
    if not (isinstance(mine, Tensor) and isinstance(its, Tensor)):
        return False
    if ends_gradients(node) and not ends_gradients(operand) and differentiable(mine):
        return False
    return tensor_spec(mine) == tensor_spec(its)


def _equals(node: fx.Node, operand: fx.Node) -> bool:
    """Whether `node` computes `operand`, if their shapes and dtypes are the same."""
    target, args = node.target, node.args
    if target in (operator.add, torch.add):  # -0.0 + 0 is 0.0
        whole = not operand.meta["val"].is_floating_point()
        return whole and _numbers(args, operand) == [0]
    if target in (operator.mul, torch.mul):
        return _numbers(args, operand) == [1]
    if target is operator.sub:
        return args[0] is operand and _numbers(args, operand) == [0]
    if target is operator.truediv:
        return args[0] is operand and _numbers(args, operand) == [1]
    if operand in _broadcast(node):
        return True
    if target is operator.getitem:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return args[0] is operand and all(any(part == whole for whole in _WHOLE) for part in index)
    if target is F.dropout:
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | node.kwargs
        chance: Any = given.get("p")
        return chance == 0.0 and not given.get("inplace", False)
    if node.op != "call_method" or args[0] is not operand:
        return False
    if target in _RESHAPES:
        return True
    if target in CASTS and len(args) == 1 and not node.kwargs:
        return _has_dtype(operand, CASTS[str(target)])
    if target == "to" and len(args) + len(node.kwargs) == 2:
        return _has_dtype(operand, [*args[1:], *node.kwargs.values()][0])
    return False


def _broadcast(node: fx.Node) -> list[fx.Node]:
    """What `node` is in its full shape: `torch.broadcast_tensors(a, b)[0]` is `a`."""
    if node.target is not operator.getitem:
        return []
    source, index = node.args
    if not isinstance(source, fx.Node) or source.target is not torch.broadcast_tensors:
        return []
    operand: Any = source.args[index]  # type: ignore[index]
    return [operand] if isinstance(operand, fx.Node) else []


def _numbers(args: Iterable[Any], operand: fx.Node) -> list[float] | None:
    rest = [arg for arg in args if arg is not operand]
    return rest if all(type(arg) in (int, float) for arg in rest) else None


def _has_dtype(operand: fx.Node, dtype: Any) -> bool:
    """Whether `operand` is of this dtype, whatever the model's own is, and under autocast too."""
    if isinstance(dtype, fx.Node) and dtype.target != DTYPE:  # that of a value
        return dtype.target is getattr and dtype.args[0] is operand
    said = CASTS.get(str(operand.target)) if operand.op == "call_method" else None
    if dtype in (said, *operand.args, *operand.kwargs.values()):
        return True
    found = operand.meta["val"].dtype
    return not found.is_floating_point and bool(found == dtype)


def _statement_goes_on(node: fx.Node) -> fx.Node | None:
    """Where `node` belongs in its statement: before the next op of it that comes after a call.

    `a * b + f(c)` is traced as `a * b`, then the lines of `f`, then the sum.
    """
    statement = node.meta.get("frames", ())
    users = list(node.users)
    if not statement or len(users) != 1 or users[0].meta.get("frames") != statement:
        return None
    if named_by_user(node):
        return None
    after, apart = node.next, False
    while after.op.startswith("call_"):
        frames = after.meta.get("frames", ())
        if frames == statement:
            alike = after.meta.get(REGION) == node.meta.get(REGION)
            return after if apart and alike else None
        inside = frames[: len(statement)] == statement
        if not inside and "text" not in after.meta:
            return None
        if after is users[0]:
            return None
        after, apart = after.next, True
    return None
