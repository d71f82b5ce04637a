"""Devices that forward names: within a stage all is on its own, so moves are left out."""

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves


def name_devices(node: fx.Node) -> None:
    """Devices that the user wrote as text become devices, as which they are those of a stage."""
    named = node.kwargs.get("device")
    if isinstance(named, str):
        node.kwargs = {**node.kwargs, "device": torch.device(named)}
    if node.op == "call_method" and node.target == "to":
        node.args = tuple(torch.device(a) if isinstance(a, str) else a for a in node.args)


def only_moves(node: fx.Node) -> bool:
    """`x.to(device)`, `x.cpu()`, `x.cuda()`: within a stage all is on its device anyway."""
    if node.op != "call_method" or node.target not in ("to", "cpu", "cuda"):
        return False
    settings = [*node.args[1:], *node.kwargs.values()]
    return all(isinstance(value, torch.device | bool | int) for value in settings)


def make_on(device: torch.device, moved: fx.Node) -> None:
    """Let a tensor that is computed of numbers alone, as `torch.arange(8) / 8`, be on `device`.

    Else it would stay where torch puts it, once the move is left out.
    """
    above = dict.fromkeys([moved])
    for node in (reached := [moved]):
        if not node.op.startswith("call_"):
            return
        tensors = [used for used in node.all_input_nodes if _has_tensors(used)]
        reached += [used for used in tensors if used not in above]
        above.update(dict.fromkeys(tensors))
    for node in above:
        if not any(map(_has_tensors, node.all_input_nodes)):
            node.kwargs = {**node.kwargs, "device": device}


def _has_tensors(node: fx.Node) -> bool:
    """Whether it is a tensor, or several; a `torch.Size` is a tuple of numbers."""
    return any(isinstance(one, Tensor) for one in tree_leaves(node.meta["val"]))


def device_of(graph: fx.Graph) -> torch.device:
    """That of its inputs."""
    values = (node.meta["val"] for node in graph.find_nodes(op="placeholder"))
    return next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
