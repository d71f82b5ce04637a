"""Buffers that a forward assigns anew, as in `self.total = self.total + x`.

Tracing drops such a write in silence. So each trace is asked what the buffers are in the end, and
that is written into them in place: `self.total.copy_(total)`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.capture.names import all_tensors
from fxpipe.capture.simplify import named_by_user
from fxpipe.errors import CaptureError
from fxpipe.interpret import by_mode
from fxpipe.ir import Op
from fxpipe.memory import storage_of
from fxpipe.specs import tensor_spec

_ASSIGNS = "assigns"  # in the meta of the nodes that write a buffer


def assigned(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Buffers and tensor attributes that are no more those of `state`, which are put back."""
    found = [name for name, now in all_tensors(model) if state.get(name, now) is not now]
    for name in found:
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, state[name])
    return found


def attribute_marks(model: nn.Module) -> dict[str, object]:
    """Something by which a change of an attribute of any module is seen; in tensors, none is."""
    return {
        f"{path}.{name}" if path else name: _mark(value)
        for path, module in model.named_modules()
        for name, value in {**vars(module), **module._buffers}.items()
    }


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names that have other marks, or none."""
    names = dict.fromkeys([*before, *after])
    return [name for name in names if before.get(name, ...) != after.get(name, ...)]


def _mark(value: object) -> object:
    if isinstance(value, bool | int | float | str):
        return value
    return type(value), len(value) if isinstance(value, list | dict | set | tuple) else None


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
            left[name] = _copy(graph, value, output)  # before that one is written itself
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
    if buffer is not None and any(_keeps(user, buffer) for user in buffer.users):
        first = next(node for node in graph.nodes if node in buffer.users)
        copy = _copy(graph, buffer, first)
        buffer.replace_all_uses_with(copy, lambda user: user is not copy)
    with graph.inserting_before(graph.output_node()):
        write = graph.call_method("copy_", (buffer or graph.get_attr(name), value))
    write.meta = {**_near(value, name), "val": new.detach(), _ASSIGNS: name}


def _kind(tensor: Tensor) -> str:
    return str(tensor_spec(tensor))


def _copy(graph: fx.Graph, buffer: fx.Node, user: fx.Node) -> fx.Node:
    """A copy of the buffer as it is before `user`, so that later writes leave it."""
    name = str(buffer.target)
    with graph.inserting_before(user):
        copy = graph.call_method("clone", (buffer,))
    beside = user if user.meta.get("module") == name.rpartition(".")[0] else buffer
    copy.meta = {**_near(beside, name), "val": buffer.meta["fake"].clone()}
    copy.meta["variable"] = f"old_{name.rpartition('.')[2]}"
    return copy


def _near(node: fx.Node, buffer: str) -> dict[str, Any]:
    """The meta of an op that belongs to `node`, or, if that is none, to the owner of `buffer`."""
    owner = buffer.rpartition(".")[0]
    alone = {"module": owner, "call": "", "stack": (), "source": None, "frames": ()}
    return node.meta if "module" in node.meta else alone


def _keeps(user: fx.Node, buffer: fx.Node) -> bool:
    """Whether `user` may hold the buffer's memory once it has run: in its result, for backward."""
    made = user.meta["val"]
    if not isinstance(made, Tensor) or made.requires_grad:
        return True
    return storage_of(made) == storage_of(buffer.meta["fake"])


def move_writes(graph: fx.Graph, ops: Mapping[str, Op], aliases: Mapping[str, str]) -> None:
    """Move each write up, right behind the last op that reads the old value or makes the new one.

    `ops` say what was seen to share memory and to be written.
    """

    def storage(node: fx.Node) -> str:
        target = str(node.target)
        return ops[node.name].storage if node.name in ops else aliases.get(target, target)

    for write in [node for node in graph.nodes if _ASSIGNS in node.meta]:
        buffer, value = write.all_input_nodes
        old, new = storage(buffer), storage(value)
        if value.target is by_mode:
            max(value.all_input_nodes).append(value)
        last = max(buffer, value)
        for node in graph.nodes:
            if node.name in ops and last < node < write:
                used = {storage(node), *map(storage, node.all_input_nodes)}
                if old in used or {old, new} & {*ops[node.name].mutates}:
                    last = node
        last.append(write)
