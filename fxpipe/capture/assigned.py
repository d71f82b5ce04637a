"""Buffers that a forward assigns anew, as in `self.total = self.total + x`, or writes in place.

Tracing drops the first in silence. So each trace is asked what the buffers are in the end, and
that is written into them in place: `self.total.copy_(total)`. Since several micro-batches are under
way at once, what the backward of one needs of a buffer that the next one writes is copied.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fxpipe.capture.names import all_tensors, attribute, derived
from fxpipe.capture.simplify import named_by_user
from fxpipe.errors import CaptureError
from fxpipe.ir import Op, own_storage
from fxpipe.memory import storage_of
from fxpipe.ops.contents import attributes, mark
from fxpipe.ops.gradients import ends_gradients
from fxpipe.ops.interpret import by_mode
from fxpipe.ops.specs import tensor_spec
from fxpipe.runtime.backward import differentiable

_ASSIGNS = "assigns"  # in the meta of the nodes that write a buffer


def assigned(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Buffers and tensor attributes that are no more those of `state`, which are put back."""
    found = [name for name, now in all_tensors(model) if state.get(name, now) is not now]
    for name in found:
        owner, own_name = attribute(model, name)
        setattr(owner, own_name, state[name])
    made = derived(model, state)
    return [name for name in found if name not in made]


def attribute_marks(model: nn.Module) -> dict[str, object]:
    """Something by which a change of an attribute of any module is seen; in tensors, none is."""
    return {name: mark(value, package) for name, value, package in attributes(model)}


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names that have other marks, or none."""
    names = dict.fromkeys([*before, *after])
    return [name for name in names if before.get(name, ...) != after.get(name, ...)]


def write_back(graph: fx.Graph, names: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Turn the last outputs of `graph`, which are what `names` are in the end, into writes.

    Raises CaptureError for one that does not fit into its buffer.
    """
    output = graph.output_node()
    (values,) = output.args
    assert isinstance(values, tuple)
    kept = len(values) - len(names)
    output.args = (values[:kept],)
    left = {
        name: value
        for name, value in zip(names, values[kept:], strict=True)
        if getattr(value, "op", "") != "get_attr" or state[value.target] is not state[name]
    }
    for name, value in left.items():
        if isinstance(value, fx.Node) and value.op == "get_attr":
            left[name] = _copy(
                graph, value, str(value.target), output
            )  # before that one is written itself
    for name, value in left.items():
        _write(graph, name, value, state[name])


def _write(graph: fx.Graph, name: str, value: Any, old: Tensor) -> None:
    """Write `value` into the buffer `name` at the end of `graph`."""
    new = value.meta["val"] if isinstance(value, fx.Node) else value
    if not isinstance(new, Tensor) or _kind(new) != _kind(old):
        found = _kind(new) if isinstance(new, Tensor) else repr(new)
        raise CaptureError(
            f"forward assigns {name!r} anew, {found} where it was {_kind(old)}: a pipeline writes "
            "it in place, so give it the same shape and dtype each time"
        )
    if not named_by_user(value):
        value.meta["variable"] = f"new_{name.rpartition('.')[2]}"
    if new.requires_grad:
        with graph.inserting_after(value):
            detached = graph.call_method("detach", (value,))
        detached.meta = {**_near(value, name), "val": new.detach()}
        value = detached
    reads = graph.find_nodes(op="get_attr", target=name)
    buffer = reads[0] if reads else None
    may = _may_have_gradients(graph)
    if buffer is not None and any(user in may or _keeps(user, buffer) for user in buffer.users):
        first = next(node for node in graph.nodes if node in buffer.users)
        copy = _copy(graph, buffer, name, first)
        buffer.replace_all_uses_with(copy, lambda user: user is not copy)
    with graph.inserting_before(graph.output_node()):
        write = graph.call_method("copy_", (buffer or graph.get_attr(name), value))
    write.meta = {**_near(value, name), "val": new.detach(), _ASSIGNS: name}


def _kind(tensor: Tensor) -> str:
    return str(tensor_spec(tensor))


def _copy(graph: fx.Graph, value: fx.Node, name: str, user: fx.Node) -> fx.Node:
    """A copy of the buffer `name`, or a view of it, as it is before `user`: no write changes it."""
    with graph.inserting_before(user):
        copy = graph.call_method("clone", (value,))
    beside = user if user.meta.get("module") == name.rpartition(".")[0] else value
    copy.meta = {**_near(beside, name), "val": _tensors(value)[0].clone()}
    copy.meta["variable"] = f"old_{name.rpartition('.')[2]}"
    return copy


def _near(node: fx.Node, buffer: str) -> dict[str, Any]:
    """The meta of an op that belongs to `node`, or, if that is none, to the owner of `buffer`."""
    owner = buffer.rpartition(".")[0]
    alone = {"module": owner, "call": "", "stack": (), "source": None, "frames": ()}
    return node.meta if "module" in node.meta else alone


def copy_what_is_kept(graph: fx.Graph, written: set[str]) -> None:
    """Copy what backward, or an output, keeps of a buffer that forward writes in place.

    `written` are the names of such buffers, to which those are added that this trace wrote.
    """
    for buffer in graph.find_nodes(op="get_attr"):
        if buffer.meta["fake"]._version > 0 and not isinstance(buffer.meta["val"], nn.Parameter):
            written.add(str(buffer.target))
        if str(buffer.target) not in written:
            continue
        memory, may = storage_of(buffer.meta["fake"]), _may_have_gradients(graph)
        for user in list(graph.nodes):
            made = any(storage_of(value) != memory for value in _tensors(user))
            if (made and user in may) or user.op == "output":
                for used in user.all_input_nodes:
                    if any(storage_of(value) == memory for value in _tensors(used)):
                        user.replace_input_with(used, _copy(graph, used, str(buffer.target), user))


def _tensors(node: fx.Node) -> list[Tensor]:
    """The fake tensors that `node` is."""
    found = node.meta.get("fake", node.meta.get("val"))
    return [value for value in tree_leaves(found) if isinstance(value, Tensor)]


def _may_have_gradients(graph: fx.Graph) -> set[fx.Node]:
    """What depends on an input or a parameter, none of which need ask for gradients by now.

    Inputs may do so later, and layers that are frozen.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        tensors = _tensors(node)
        begins = (
            node.op == "placeholder"
            or isinstance(node.meta.get("val"), nn.Parameter)
            or any(tensor.requires_grad for tensor in tensors)
            or not found.isdisjoint(node.all_input_nodes)
        )
        if not begins or node.op == "output" or ends_gradients(node):
            continue
        if any(map(differentiable, tensors)):
            found.add(node)
        if node.target is operator.setitem:  # into what may have had none
            found.update(node.all_input_nodes[:1])
    return found


def _keeps(user: fx.Node, buffer: fx.Node) -> bool:
    """Whether what `user` makes may have the buffer's memory."""
    made = user.meta["val"]
    return not isinstance(made, Tensor) or storage_of(made) == storage_of(buffer.meta["fake"])


def move_writes(graph: fx.Graph, ops: Mapping[str, Op], aliases: Mapping[str, str]) -> None:
    """Move each write up, right behind the last op that reads the old value or makes the new one.

    `ops` say what was seen to share memory and to be written.
    """

    def memories(node: fx.Node) -> tuple[str, ...]:
        if node.op == "get_attr":
            return (own_storage(aliases.get(str(node.target), str(node.target))),)
        return ops[node.name].memories if node.name in ops else (node.name,)

    for write in [node for node in graph.nodes if _ASSIGNS in node.meta]:
        buffer, value = write.all_input_nodes
        old, new = {*memories(buffer)}, {*memories(value)}
        for either in (buffer, value):
            if either.target is by_mode:
                max(either.all_input_nodes).append(either)
        last = max(buffer, value)
        for node in graph.nodes:
            if node.name in ops and last < node < write:
                used = {name for one in (node, *node.all_input_nodes) for name in memories(one)}
                if old & used or (old | new) & {*ops[node.name].mutates}:
                    last = node
        last.append(write)
