"""Whose memory a result may be: it hangs on the mode, and on sizes and dtypes.

A dropout gives a new tensor in training and its input in evaluation; `contiguous` gives its input
where that has one row. What is written in place is written in all that it may be.
"""

import dataclasses
from collections.abc import Mapping

from torch import Tensor, fx, nn

from fxpipe.ir import Op, own_storage
from fxpipe.memory import storage_of
from fxpipe.ops.interpret import by_mode

# Views of their input, or copies, by its strides or its dtype.
_VIEW_OR_COPY = {
    *("contiguous", "reshape", "reshape_as", "flatten", "ravel", "Flatten", "sum_to_size"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16"),
}


def owners(state: Mapping[str, Tensor]) -> dict[int, str]:
    """By memory, what that of the model's own tensors is called."""
    return {storage_of(tensor): own_storage(name) for name, tensor in reversed([*state.items()])}


def merge_ops(
    graph: fx.Graph,
    modules: Mapping[str, nn.Module],
    state: Mapping[str, Tensor],
    training: Mapping[str, Op],
    evaluation: Mapping[str, Op],
) -> dict[str, Op]:
    """What is known from both modes, in the order of the graph."""
    own = owners(state)
    merged: dict[str, Op] = {}

    def memories(node: fx.Node) -> tuple[str, ...]:
        if node.op == "get_attr" and node.target in state:
            return (own[storage_of(state[str(node.target)])],)
        return merged[node.name].memories if node.name in merged else (node.name,)

    for node in graph.nodes:
        given = [memories(used) for used in node.all_input_nodes]
        seen = [ops[node.name] for ops in (training, evaluation) if node.name in ops]
        if node.target is by_mode:
            storage, *others = (name for names in given for name in names)
            op = Op(node.name, node.meta.get("module", ""), node.meta.get("source"), storage)
        elif seen:
            others = [op.storage for op in seen]
            others += [name for k in others if k in merged for name in merged[k].may_share]
            if _name(node, modules) in _VIEW_OR_COPY and given:
                others += given[0]
            mutates = {name for one in seen for name in one.mutates}
            for names in given:
                others += names if {*names} & {*others} else ()
                mutates |= {*names} if {*names} & mutates else set()
            op = dataclasses.replace(seen[0], mutates=tuple(sorted(mutates)))
        else:
            continue
        may_share = tuple(name for name in dict.fromkeys(others) if name != op.storage)
        merged[node.name] = dataclasses.replace(op, may_share=may_share)
    return merged


def _name(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    """Of the method, function or class of module that `node` calls."""
    if node.op == "call_module":
        return type(modules[str(node.target)]).__name__
    return str(getattr(node.target, "__name__", node.target))
