"""A batch cut into micro-batches, and their outputs put together again."""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime.backward import differentiable
from fxpipe.runtime.fit import misfits
from fxpipe.runtime.leaves import in_mode, leaves, places
from fxpipe.runtime.manifest import UNKNOWN, Manifest, OutputSpec, TensorSpec
from fxpipe.runtime.structure import tensors_of


def bind(manifest: Manifest, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Tensor]:
    """The tensors of a call in the order of `manifest.inputs`. Raises InputError."""
    given = _named(manifest, args, kwargs)
    compiled = manifest.input_structure["dict"]
    for name, structure in compiled.items():
        if name not in given and structure == {"constant": None}:
            given[name] = None
    missing = [name for name in compiled if name not in given]
    if missing:
        raise InputError(f"missing inputs: {', '.join(missing)}")
    return tensors_of(manifest.input_structure, given)


def bind_some(
    manifest: Manifest,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    needed: Set[int],
) -> list[Tensor | None]:
    """The same of a call that may lack arguments, or have None for them, of no tensor `needed`."""
    given = _named(manifest, args, kwargs)
    found: list[Tensor | None] = []
    missing = []
    for name, structure in manifest.input_structure["dict"].items():
        value, tensors = given.get(name), places(structure)
        if value is not None:
            found += tensors_of({"dict": {name: structure}}, {name: value})
        elif needed.isdisjoint(tensors):
            found += [None] * len(tensors)
        else:
            missing.append(name)
    if missing:
        raise InputError(f"its stages read {', '.join(missing)}: give it to this rank too")
    return found


def present(manifest: Manifest, tensors: Sequence[Tensor | None]) -> tuple[Manifest, list[Tensor]]:
    """The plan as if its inputs were those that are there, and those tensors."""
    there = [tensor for tensor in tensors if tensor is not None]
    if len(there) == len(tensors):
        return manifest, there
    specs = [spec for spec, t in zip(manifest.inputs, tensors, strict=True) if t is not None]
    sizes = {dim for spec in specs for dim in map(str, spec.spec.shape)} | {"batch"}
    unknown = [name for name in manifest.sizes if name not in sizes]
    conditions = [
        condition
        for condition in manifest.conditions
        if not any(re.search(rf"\b{name}\b", condition) for name in unknown)
    ]
    return replace(manifest, inputs=tuple(specs), conditions=tuple(conditions)), there


def _named(
    manifest: Manifest, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """The arguments of a call by name. Raises InputError."""
    names = [name for name in manifest.signature if not name.startswith("*")]
    rest = next((name for name in manifest.signature if name.startswith("*")), None)
    placed = names if rest is None else names[: manifest.signature.index(rest)]
    if len(args) > len(placed) and rest is None:
        raise InputError(
            f"{len(args)} positional inputs were given, {manifest.model}'s forward takes "
            f"{len(names)}: {', '.join(names)}"
        )
    given: dict[str, object] = dict(zip(placed, args, strict=False))
    if rest is not None:
        given[rest[1:]] = tuple(args[len(placed) :])
    for name, value in kwargs.items():
        if name in given:
            raise InputError(f"{name!r} was given twice, by position and by name")
        if name not in names:
            # What `**kwargs` may take too is not known here.
            raise InputError(
                f"{name!r} was no input of {manifest.model}'s forward when the pipeline was "
                f"compiled; those were {', '.join(names)}: leave it out, or compile again with it, "
                "if the model takes it"
            )
        given[name] = value
    compiled = manifest.input_structure["dict"]
    for name in [name for name in given if name not in compiled]:
        if given.pop(name) is not None:
            raise InputError(
                f"{name!r} was not given when the pipeline was compiled, with "
                f"{', '.join(compiled)}: leave it out, or compile again with it"
            )
    return given


def rows_of(manifest: Manifest, tensors: Sequence[Tensor], m: int) -> list[int]:
    """The rows of each micro-batch: sizes that differ by at most 1, larger first.

    They are m, or fewer if there are not that many rows. Without a batched input each counts as one
    row. Checks shapes too; raises InputError that names every input that does not fit.
    """
    pairs = list(zip(manifest.inputs, tensors, strict=True))
    batches = {
        spec.value: tensor.size(0) for spec, tensor in pairs if spec.batched and tensor.dim()
    }
    batch = next(iter(batches.values()), None)
    parts = parts_of(batch or manifest.batch, min(batch or m, m))
    broken = [*misfits(manifest, tensors, parts)]
    if len(set(batches.values())) > 1:
        sizes = ", ".join(f"{name} has {size}" for name, size in batches.items())
        broken.append(f"batched inputs must have equally many rows: {sizes}")
    if batch == 0:
        broken.append("a batch of 0 rows can't be cut into micro-batches: give at least one row")
    if broken:
        raise InputError("\n".join(broken))
    return [1] * m if batch is None else parts


def parts_of(batch: int, m: int) -> list[int]:
    """`batch` rows in m parts that differ by at most 1, larger first."""
    return [batch // m + (i < batch % m) for i in range(m)]


def scatter(
    manifest: Manifest, tensors: Sequence[Tensor], rows: Sequence[int]
) -> list[dict[str, Tensor]]:
    """For each micro-batch its piece of each input, by value name."""
    pieces: list[dict[str, Tensor]] = [{} for _ in rows]
    for spec, tensor in zip(manifest.inputs, tensors, strict=True):
        cut = tensor.split(list(rows)) if spec.batched else [tensor] * len(rows)  # type: ignore[no-untyped-call]
        for piece, part in zip(pieces, cut, strict=True):
            piece[spec.value] = part
    return pieces


def unmergeable(manifest: Manifest, training: bool) -> str | None:
    """An output that the micro-batches' can't be put together to, and why; None if all can."""
    if manifest.microbatches == 1:
        return None
    for path, place in leaves(in_mode(manifest.output_structure, training)):
        spec = manifest.outputs[place].spec
        why = why_unmergeable(spec)
        if why is not None:
            return f"output{path} {spec} {why}"
    return None


def why_unmergeable(spec: TensorSpec) -> str | None:
    """Why outputs of micro-batches can't be put together to the batch's; None if they can."""
    grows = [str(size) for size in spec.shape if "batch" in str(size)]
    if len(grows) > 1:
        return "compares all rows of the batch with each other"
    if grows and not re.fullmatch(r"(\w+\*)*batch(\*\w+)*", grows[0]):
        return "has not as many rows for each row of the batch"
    return None


def refuse_other_mode(manifest: Manifest, training: bool) -> None:
    """Raise InputError if the package lacks the mode that the pipeline is in."""
    if not training and not manifest.has_eval:
        raise InputError(
            f"{manifest.model} takes another path in eval mode, which this pipeline does not have: "
            "evaluate the original model with this one's state_dict()"
        )


def refuse_unmergeable(manifest: Manifest, training: bool) -> None:
    """Raise InputError if an output can't be put together from those of several micro-batches."""
    reason = unmergeable(manifest, training)
    if reason is not None:
        raise InputError(
            f"{reason}, but each of the {manifest.microbatches} micro-batches sees its own rows "
            "alone: take each micro-batch's in the loss_fn of step() or in a closure of "
            "fxpipe.Runner, or compile with --microbatches 1"
        )


def merged_dim(spec: TensorSpec) -> int | None:
    """The dimension that grows with the batch, along which outputs are put together.

    Where none is known to, the first whose size depends on data: as of rows that are selected.
    """
    sizes = [str(size) for size in spec.shape]
    grows = [dim for dim, size in enumerate(sizes) if "batch" in size]
    open_ = [dim for dim, size in enumerate(sizes) if UNKNOWN in size]
    return next(iter((*grows, *open_)), None)


def gather(output: OutputSpec, pieces: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """The batch's output from the micro-batches'.

    Concatenated along the dimension that grows with the batch; without one, a number is taken for
    a mean over the micro-batch's rows, and of anything else the last one counts.
    """
    dim = merged_dim(output.spec)
    if len(pieces) == 1:
        return pieces[0]
    if dim is not None:
        return torch.cat(list(pieces), dim)
    if not differentiable(pieces[0]):
        return pieces[-1]
    total = pieces[0] * (rows[0] / sum(rows))
    for piece, n in zip(pieces[1:], rows[1:], strict=True):
        total = total + piece * (n / sum(rows))
    return total


def split_target(target: Any, rows: Sequence[int]) -> list[Any]:
    """For each micro-batch its piece of a tensor, or tuple, list or dict of tensors.

    Tensors with as many rows as the batch are cut; all else goes whole to each.
    """
    if isinstance(target, Tensor) and target.dim() and target.size(0) == sum(rows):
        return list(target.split(list(rows)))  # type: ignore[no-untyped-call]
    cut = map_nested(lambda child: iter(split_target(child, rows)), target)
    return [target if cut is target else map_nested(next, cut) for _ in rows]


def map_tensors(function: Callable[[Tensor], Tensor], node: Any) -> Any:
    """`node` with `function` applied to each tensor in tuples, lists and dicts."""
    if isinstance(node, Tensor):
        return function(node)
    return map_nested(lambda child: map_tensors(function, child), node)


def map_nested(function: Callable[[Any], Any], node: Any) -> Any:
    """`node` with `function` applied to the items of a tuple, list or dict; else as it is."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*map(function, node))
    if isinstance(node, tuple | list):
        return type(node)(map(function, node))
    if isinstance(node, Mapping):
        return {key: function(value) for key, value in node.items()}
    return node
