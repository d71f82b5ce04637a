"""What a structure holds: tensors and constants, where each sits, in which mode."""

from collections.abc import Iterator, Sequence
from typing import Any

from fxpipe.runtime.structure import Structure


def in_mode(structure: Structure, training: bool) -> Structure:
    """The structure in train or in eval mode."""
    if "train" not in structure:
        return structure
    found: Structure = structure["train" if training else "eval"]
    return found


def leaves(structure: Structure) -> list[tuple[str, int]]:
    """Where each tensor sits, as in `.hidden[0]`, and its number, in the order of `describe`."""
    return [(path, inner) for path, kind, inner in _ends(structure, "") if kind == "tensor"]


def constants(structure: Structure) -> list[tuple[str, Any]]:
    """Where each constant sits, and which it is."""
    return [(path, inner) for path, kind, inner in _ends(structure, "") if kind == "constant"]


def places(structure: Structure) -> list[int]:
    """The numbers of the tensors of a structure of one mode, in the order of `describe`."""
    return [number for _, number in leaves(structure)]


def renumbered(node: Any, numbers: Sequence[int]) -> Any:
    """The same structure with the number `numbers[k]` in the place of k."""
    if isinstance(node, list):
        return [renumbered(child, numbers) for child in node]
    if not isinstance(node, dict):
        return node
    return {
        key: numbers[child]
        if key in ("tensor", "dtype", "device") and isinstance(child, int)
        else renumbered(child, numbers)
        for key, child in node.items()
    }


def _ends(structure: Structure, path: str) -> Iterator[tuple[str, str, Any]]:
    """Path, kind and content of whatever holds nothing else."""
    kind, inner = next(iter(structure.items()))
    if kind in ("tuple", "list"):
        children = [(f"[{k}]", child) for k, child in enumerate(inner)]
    elif kind in ("dict", "items"):
        children = [(f"[{key!r}]", child) for key, child in dict(inner).items()]
    elif kind in ("class", "object"):
        fields = structure["fields" if kind == "class" else "attributes"]
        children = [(f".{name}", child) for name, child in fields.items()]
    else:
        yield path, kind, inner
        return
    for step, child in children:
        yield from _ends(child, path + step)
