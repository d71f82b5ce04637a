"""Parameters that stages of several ranks use: equal on all, and with one gradient.

Each holder computes with a leaf of its own, one for all its stages, whose gradient begins with a
part of what earlier steps have left; after a step the leaves' gradients are added up over the
holders in all replicas, and the sum goes to the parameter of each. So all holders' optimizers take
equal steps. The owner, whose values the others begin with, is the rank of the first stage that uses
it.

Where a parameter is sharded over the replicas, each share's gradient has been summed over them
before, and is added up over the holders within the replica.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpipe.runtime.distributed.around import names_around
from fxpipe.runtime.distributed.dtensors import broadcast, local, shared_like
from fxpipe.runtime.distributed.earlier import parted
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.ties import Use, bound
from fxpipe.runtime.weight_gradients import has_hooks


@dataclass(frozen=True, slots=True)
class Shared:
    """A parameter that this rank holds with others; `uses` are those of this rank's stages.

    Gradients are added up over `group`, in which the owner is number `owner`.
    """

    name: str
    owner: int
    group: Any
    uses: tuple[Use, ...]


def holders(manifest: Manifest) -> dict[str, list[int]]:
    """By the first name of each parameter and buffer, the ranks that hold it, the owner first.

    What no stage uses the first rank holds; what stands around a part of a model, all do.
    """
    first = first_names(manifest)
    found: dict[str, list[int]] = {name: [] for name in first.values()}
    for stage in manifest.stages:
        for name in (*stage.parameters, *stage.buffers):
            if stage.device not in found[first[name]]:
                found[first[name]].append(stage.device)
    around, every = names_around(manifest), [*range(len(manifest.devices))]
    return {name: ranks or (every if name in around else [0]) for name, ranks in found.items()}


def first_names(manifest: Manifest) -> dict[str, str]:
    """By each name of a parameter or buffer, its first."""
    return {spec.name: spec.alias_of or spec.name for spec in manifest.state}


def held_elsewhere(manifest: Manifest, ranks: Ranks) -> frozenset[str]:
    """The first names of the parameters that this rank holds and others too, replicas' included."""
    kinds = {spec.name: spec.kind for spec in manifest.state}
    return frozenset(
        name
        for name, among in holders(manifest).items()
        if kinds[name] == "parameter" and ranks.rank in among and len(among) * ranks.dp > 1
    )


class SharedWeights:
    """Those of one rank."""

    def __init__(
        self, manifest: Manifest, stages: Sequence[Stage], ranks: Ranks, sharded: bool
    ) -> None:
        """All ranks make theirs together."""
        self._ranks = ranks
        self.shared: list[Shared] = []
        names, held = first_names(manifest), holders(manifest)
        around = names_around(manifest)
        kinds = {spec.name: spec.kind for spec in manifest.state}
        groups: dict[tuple[int, ...], Any] = {}
        for first, among in held.items():
            if len(among) < 2 or kinds[first] != "parameter" or first in around:
                continue
            for replicas in [[d] for d in range(ranks.dp)] if sharded else [range(ranks.dp)]:
                members = tuple(d * ranks.size + rank for d in replicas for rank in sorted(among))
                if members not in groups:
                    groups[members] = ranks.new_group(members)
                if ranks.world_rank in members:
                    group = groups[members]
            if ranks.rank in among:
                uses = tuple(
                    (stage, name)
                    for stage in stages
                    for name in stage.spec.parameters
                    if names[name] == first
                )
                self.shared.append(Shared(first, sorted(among).index(among[0]), group, uses))

    def equalize(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give all holders the owner's values."""
        for each in self.shared:
            self._ranks.together(partial(broadcast, parameters[each.name], each.group, each.owner))

    @contextmanager
    def collected(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """For `step`: when the block ends, each parameter gets the sum of all stages' gradients."""
        begun = [_Begun(parameters[each.name]) for each in self.shared]
        leaves = [one.leaf for one in begun]
        earlier = [
            (leaf.grad, each.group.size())
            for each, leaf in zip(self.shared, leaves, strict=True)
            if leaf.grad is not None
        ]
        with parted(earlier), bound([each.uses for each in self.shared], leaves):
            yield
        for each, one in zip(self.shared, begun, strict=True):
            one.give(self._summed(each, one.leaf.grad, one.parameter))

    def sum_shares(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give each parameter, of which a rank has a share, the sum of all stages' gradients."""
        for each in self.shared:
            parameter = parameters[each.name]
            own = None if parameter.grad is None else local(parameter.grad)
            total = self._summed(each, own, local(parameter))
            parameter.grad = None if total is None else shared_like(parameter, total)

    def _summed(self, each: Shared, own: Tensor | None, parameter: Tensor) -> Tensor | None:
        if not parameter.requires_grad:
            return None
        there = parameter.new_full((1,), own is not None)
        given = torch.zeros_like(parameter) if own is None else own
        given = given.to_dense() if given.is_sparse else given  # another holder's may be dense
        # The last number counts the holders that have a gradient.
        flat = torch.cat([given.reshape(-1), there])
        self._ranks.together(lambda: dist.all_reduce(flat, group=each.group))
        return flat[:-1].view_as(parameter) if flat[-1] else None


class _Begun:
    """What a holder computes a step with in the place of `parameter`: its `leaf`.

    Where steps add up, the leaf's gradient begins as the parameter's, in its memory; a second one
    is held only where a hook on the parameter is to see this step's alone.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.leaf = parameter.detach().requires_grad_(parameter.requires_grad)
        self._before = parameter.grad if parameter.requires_grad else None
        self._apart = has_hooks(parameter)
        if self._before is not None:
            self.leaf.grad = self._before.clone() if self._apart else self._before

    def give(self, total: Tensor | None) -> None:
        """Let the parameter have the `total` over all holders."""
        if total is None:
            return
        if self._before is None:
            torch.autograd.backward([self.parameter], [total])
        elif self._apart:
            torch.autograd.backward([self.parameter], [total - self._before])
        else:
            self._before.copy_(total)
