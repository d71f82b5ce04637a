"""What stands around a part of a model whose pipeline runs over processes: every rank has it all.

It computes the same on each, from equal values; so gradients are equal, and nobody adds them up.
"""

from collections.abc import Sequence

from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime.distributed.dtensors import broadcast
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.manifest import Manifest


def names_around(manifest: Manifest) -> frozenset[str]:
    """The first names of what no stage uses, if the package is of a part of a model."""
    if manifest.part is None:
        return frozenset()
    first = {spec.name: spec.alias_of or spec.name for spec in manifest.state}
    used = {first[name] for s in manifest.stages for name in (*s.parameters, *s.buffers)}
    return frozenset(first.values()) - used


def refuse_part(manifest: Manifest, fully_shard: bool) -> None:
    """Raise InputError if a package is of a part that can't run over processes so."""
    if manifest.part is None:
        return
    if fully_shard:
        raise InputError(
            f"the package is of a part of {manifest.model}, whose parameters the rest of the model "
            "holds too: load it without fully_shard"
        )
    used = {name for stage in manifest.stages for name in stage.parameters}
    inside = tuple(f"{path}." for path in manifest.part.modules)
    groups: dict[str, list[str]] = {}
    for spec in manifest.state:
        if spec.kind == "parameter" and spec.spec.requires_grad:
            groups.setdefault(spec.alias_of or spec.name, []).append(spec.name)
    for names in groups.values():
        outer = [name for name in names if not name.startswith(inside)]
        if outer and not used.isdisjoint(names):
            inner = [name for name in names if name not in outer]
            raise InputError(
                f"{', '.join(outer)}, outside of the pipeline, is tied to {', '.join(inner)} in "
                "it: over several processes their gradients would not be added up. Run the package "
                "in one process, or untie them"
            )


def equalize_around(tensors: Sequence[Tensor], ranks: Ranks) -> None:
    """Give all processes the values that the first has; all call it together."""

    def collective() -> None:
        for tensor in tensors:
            broadcast(tensor, ranks.world_group, 0)

    with ranks.telling():
        ranks.together(collective)
