"""Runs a captured graph op by op on real tensors, with a hook around each op."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ops.contents import Contents, restore
from fxpipe.ops.regions import REGION, Switch

# The names under which a graph reads whether it runs in train mode, and the model's own dtype:
# no attribute of a model can have them.
TRAINING = "$training"
DTYPE = "$dtype"
# Keys of a node's meta: whether only train mode (True) or only eval mode (False) runs it, and with
# which others it stands where the modes part.
MODE = "mode"
HUNK = "hunk"
# Whether a value has its name from a variable of the user's ("variable"), from what made it
# ("maker"), or is it but a word for what the op does ("word").
NAMED = "named"

Compute = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Hook = Callable[[fx.Node, Compute, tuple[Any, ...], dict[str, Any]], Any]


def when_training(training: bool, probability: float) -> float:
    """The dropout probability in force."""
    return probability if training else 0.0


def limit(dtype: torch.dtype, name: str) -> float:
    """A limit of floating numbers, such as `min`."""
    return float(getattr(torch.finfo(dtype), name))


def reads_dtype(node: fx.Node) -> bool:
    """Whether `node` is `h.dtype`, or a limit of that: no tensor, and read by one op alone."""
    return node.target is limit or (node.target is getattr and node.args[1] == "dtype")


def reads_mode(node: fx.Node) -> bool:
    """Whether what `node` does, or that it is run at all, hangs on train or eval mode."""
    read = [one for used in node.all_input_nodes for one in (used, *used.all_input_nodes)]
    flags = (used for used in read if used.op == "get_attr" and used.target == TRAINING)
    return MODE in node.meta or node.target is by_mode or any(flags)


def by_mode(in_training: Any, in_evaluation: Any) -> Any:
    """Stands in a graph for the first value in train mode and for the second in eval mode."""
    raise AssertionError("run_graph picks the value, since only one of them is computed")


def plainly(node: fx.Node, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook that only computes."""
    return compute(args, kwargs)


def run_graph(
    graph: fx.Graph,
    modules: Mapping[str, nn.Module],
    state: Mapping[str, Any],
    inputs: Sequence[Tensor],
    hook: Hook = plainly,
) -> list[Any]:
    """The graph's outputs on `inputs`; `hook` computes each op and may measure around it.

    A value is dropped after its last use. An output that the mode lacks is None.
    """
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    training = state.get(TRAINING, True)
    with Switch() as switch:
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = state[str(node.target)]
            elif node.meta.get(MODE, training) != training:
                continue
            elif node.target is by_mode:
                values[node] = values[node.all_input_nodes[0 if training else 1]]
            elif node.op == "output":
                return list(fx.map_arg(node.args[0], values.get))
            else:
                args = fx.map_arg(node.args, values.__getitem__)
                kwargs = fx.map_arg(node.kwargs, values.__getitem__)
                switch.to(node.meta.get(REGION, switch.region))
                values[node] = hook(node, _compute(node, modules), args, kwargs)
            for used in node.all_input_nodes:
                if used.op != "get_attr" and not any(user > node for user in used.users):
                    values.pop(used, None)
    raise AssertionError("a graph ends in an output")


def _compute(node: fx.Node, modules: Mapping[str, nn.Module]) -> Compute:
    if node.op == "call_module":
        module = modules[str(node.target)]
        return lambda args, kwargs: module(*args, **kwargs)
    if node.op == "call_method":
        name = str(node.target)
        return lambda args, kwargs: getattr(args[0], name)(*args[1:], **kwargs)
    function: Any = node.target
    return lambda args, kwargs: function(*args, **kwargs)


def buffers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of all that is no parameter."""
    return {k: t.detach().clone() for k, t in state.items() if not isinstance(t, nn.Parameter)}


@contextmanager
def untouched(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Put attributes, hooks, buffers, train flags and random state back afterwards."""
    kept, contents = buffers(state), Contents(model, state)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        contents.put_back()
        for name, value in kept.items():
            restore(state[name], value)


def model_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating parameter."""
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(floating, torch.get_default_dtype())
