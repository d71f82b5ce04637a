"""A part of a program that Dynamo gave as one graph, as a module that can be captured.

`torch.compile` hands its backend a graph whose inputs are the part's tensors, the parameters and
buffers it reads, and sizes. A region is that graph as a function of the tensors alone, with the
parameters, buffers and names of the module whose code it is.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.capture.inputs import batch_of
from fxpipe.capture.names import model_names
from fxpipe.errors import CaptureError, InputError


class Excerpt(nn.Module):
    """A part of a program: what is around it may go on with what it was given."""


class Region(Excerpt):
    """The graph of `traced`, called like any module.

    It has no mode of its own: the graph holds for the modes that the modules are in.
    """

    traced: fx.GraphModule

    def train(self, mode: bool = True) -> "Region":
        """Leave the modules as they are."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Region":
        raise CaptureError("a region is traced in one precision")


def region(traced: fx.GraphModule, root: nn.Module) -> Region:
    """The region of `traced`, a graph that lies within the code of `root`."""
    names: list[str] = []
    for node in _placeholders(traced):
        name = node.name.removeprefix("l_").strip("_") or node.name
        names.append(f"{name}_{len(names)}" if name in names else name)

    def forward(*tensors: Tensor, **named: Tensor) -> list[Tensor]:
        return list(traced.forward(*tensors, *named.values()))

    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    kind = type(type(root).__name__, (Region,), {})
    made: Region = object.__new__(kind)
    # All that the root holds, under the same names; the graph is no child.
    made.__dict__ = {**root.__dict__, "traced": traced, "forward": forward}
    return made


def inputs_of(traced: fx.GraphModule, root: nn.Module) -> dict[int, Tensor]:
    """The real tensors that are no state of `root`, by their place among the placeholders.

    Raises InputError for numbers that may change, and for parameters of another module.
    """
    state = model_names(root).tensors
    found: dict[int, Tensor] = {}
    for k, node in enumerate(_placeholders(traced)):
        real = node.meta["grapharg"].example
        if isinstance(real, nn.Parameter) and id(real) not in state:
            raise InputError(
                f"the forward of {type(root).__name__} reads a parameter of another module "
                f"({node.name}): give torch.compile the module that holds both"
            )
        if isinstance(real, Tensor) and id(real) not in state:
            found[k] = real
    if not any(tensor.dim() for tensor in found.values()):
        raise InputError(f"the forward of {type(root).__name__} takes no tensor with a batch")
    return found


def has_open_batch(traced: fx.GraphModule, inputs: Mapping[int, Tensor]) -> bool:
    """Whether the batch is a symbol in the graph, and every other size a number."""
    _, batched = batch_of(list(inputs.values()))
    placeholders = _placeholders(traced)
    return all(
        isinstance(size, int) != (is_batched and dim == 0)
        for k, is_batched in zip(inputs, batched, strict=True)
        for dim, size in enumerate(placeholders[k].meta["example_value"].shape)
    )


def closed(given: fx.GraphModule, inputs: Mapping[int, Tensor]) -> fx.GraphModule:
    """`given` as a graph of its inputs alone: state becomes attributes, sizes are read off."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(given.graph, {}))
    traced = fx.GraphModule(given, graph)
    placeholders = _placeholders(traced)
    _, batched = batch_of(list(inputs.values()))
    first = placeholders[list(inputs)[batched.index(True)]]
    for k, node in enumerate(placeholders):
        if k in inputs:
            continue
        real = node.meta["grapharg"].example
        with traced.graph.inserting_after(placeholders[-1]):
            if isinstance(real, Tensor):
                if isinstance(real, nn.Parameter):
                    traced.register_parameter(f"state_{k}", real)
                else:
                    traced.register_buffer(f"state_{k}", real)
                new = traced.graph.get_attr(f"state_{k}")
            else:
                new = traced.graph.call_method("size", (first, 0))
        new.meta = {"example_value": node.meta["example_value"]}
        node.replace_all_uses_with(new)
        traced.graph.erase_node(node)
    traced.recompile()
    return traced


def _placeholders(traced: fx.GraphModule) -> list[fx.Node]:
    return [node for node in traced.graph.nodes if node.op == "placeholder"]
