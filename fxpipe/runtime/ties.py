"""One parameter used by stages of several lanes: one owner, copies for the others, one gradient.

The owner is the first stage that holds it. On the owner's device the others hold the very
Parameter; elsewhere they get a copy of its current value for each call, one for all of a lane.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.runtime.memory import Memory
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.swapping import swapped
from fxpipe.runtime.weight_gradients import has_hooks

# A stage, and the name under which it uses the parameter.
Use = tuple[Stage, str]
Copies = dict[int, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Tie:
    """One lane's stages have these `uses` of the parameter `owner`, which another lane's owns."""

    owner: str
    uses: Sequence[Use]
    same_device: bool

    @property
    def lane(self) -> int:
        """The lane of all its stages."""
        return self.uses[0][0].lane

    @property
    def device(self) -> torch.device:
        """The lane's."""
        return self.uses[0][0].device


@contextmanager
def copied(ties: Sequence[Tie], parameters: Mapping[str, nn.Parameter]) -> Iterator[Copies]:
    """For `pipe(x)`: copies on other devices, made by autograd, which adds their gradients up."""
    apart = [tie for tie in ties if not tie.same_device]
    copies = [parameters[tie.owner].to(tie.device) for tie in apart]
    with bound([tie.uses for tie in apart], copies) as by_stage:
        yield by_stage


@contextmanager
def collected(
    ties: Sequence[Tie], parameters: Mapping[str, nn.Parameter], memory: Memory | None
) -> Iterator[None]:
    """For `step`: each lane has a leaf of its own, whose gradient goes to the owner's at the end.

    So no two threads write one gradient, and the sum is in the order of the lanes' first stages.
    While `memory` is measured, lanes of one device have values of their own too. Raises InputError
    if a hook would see that sum, and not the gradients of each micro-batch.
    """
    owners = [parameters[tie.owner] for tie in ties]
    hooked = {t.owner: None for t, p in zip(ties, owners, strict=True) if has_hooks(p)}
    if hooked:
        raise InputError(
            f"stages of several devices share {', '.join(hooked)}, and a hook on it would get the "
            "sum of what the others have, not the gradients of each micro-batch: change its .grad "
            "after step, or call pipe(x) and backward()"
        )
    values = [owner.detach().to(tie.device) for tie, owner in zip(ties, owners, strict=True)]
    if memory is not None:
        values = [memory.held(value, tie.lane) for tie, value in zip(ties, values, strict=True)]
    leaves = [
        value.requires_grad_(owner.requires_grad)
        for value, owner in zip(values, owners, strict=True)
    ]
    with bound([tie.uses for tie in ties], leaves):
        yield
    for owner, leaf in zip(owners, leaves, strict=True):
        if leaf.grad is not None:
            torch.autograd.backward([owner], [leaf.grad.to(owner.device)])


@contextmanager
def bound(ties: Sequence[Sequence[Use]], tensors: Sequence[Tensor]) -> Iterator[Copies]:
    """Let each tie's stages compute with its tensor in the place of the parameter."""
    by_stage: Copies = {}
    with ExitStack() as stack:
        for uses, tensor in zip(ties, tensors, strict=True):
            for stage, name in uses:
                stack.enter_context(swapped(stage.module, "_parameters", {name: tensor}))
                by_stage.setdefault(stage.index, {})[name] = tensor
        yield by_stage
