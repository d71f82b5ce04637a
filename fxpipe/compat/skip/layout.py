"""From which partition to which each skip goes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fxpipe.compat.skip.skippable import Skippable
from fxpipe.compat.skip.tracker import Skip


@dataclass(frozen=True, slots=True)
class Routes:
    """Skips that leave their partition.

    `stashed[j]`: those of partition j with the partition that pops them; `popped[j]`: those that
    partition j pops, with the partition they come from.
    """

    stashed: Sequence[Mapping[Skip, int]]
    popped: Sequence[Mapping[Skip, int]]


def inspect_skip_layout(partitions: Sequence[nn.Module]) -> Routes:
    """The routes between partitions whose skippables match."""
    stashed: list[dict[Skip, int]] = [{} for _ in partitions]
    popped: list[dict[Skip, int]] = [{} for _ in partitions]
    sources: dict[Skip, int] = {}
    for j, partition in enumerate(partitions):
        for _, layer in skippables(partition):
            for skip in layer.poppable():
                source = sources.pop(skip)
                if source != j:
                    stashed[source][skip] = j
                    popped[j][skip] = source
            sources |= dict.fromkeys(layer.stashable(), j)
    return Routes(stashed, popped)


def skippables(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Skippable]]:
    """The skippable layers of a Sequential, and of Sequentials in it, by name, in order."""
    for name, layer in module.named_children():
        if isinstance(layer, Skippable):
            yield prefix + name, layer
        elif isinstance(layer, nn.Sequential):
            yield from skippables(layer, f"{prefix}{name}.")
