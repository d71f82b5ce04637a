"""Modules that no class of the package can stand for."""

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from fxpipe.ir import Capture


def unfit_paths(
    ops: Sequence[Sequence[fx.Node]], calls: Mapping[str, int], capture: Capture
) -> set[str]:
    """Paths of modules that no class can stand for, from the ops of each stage.

    Ops outside of their calls use something of them, or a cut divides one of several calls; `calls`
    counts those that no cut divides.
    """
    unfit: set[str] = set()
    made: dict[str, set[str]] = {}
    for node in (node for stage in ops for node in stage):
        stack = node.meta.get("stack", ())
        for path, key in stack:
            made.setdefault(path, set()).add(key)
        for name in _names_used(node, capture):
            parts = name.split(".")
            unfit |= {".".join(parts[:k]) for k in range(1, len(parts))} - {p for p, _ in stack}
    divided = {path for path, keys in made.items() if len(keys) > max(1, calls.get(path, 0))}
    return unfit | divided


def _names_used(node: fx.Node, capture: Capture) -> Iterator[str]:
    for used in node.all_input_nodes:
        if used.op == "get_attr" and str(used.target) in capture.state:
            yield str(used.target)
    if node.op == "call_module":
        yield str(node.target)
