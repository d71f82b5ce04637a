"""A partition's forward on one micro-batch as a function from tensors to tensors.

Its inputs are the tensors of the value that it takes and of the skips that it pops; its outputs
those of the value that it returns and of what it stashes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compat.buffers import Written
from fxpipe.compat.microbatch import Form, split
from fxpipe.compat.skip.tracker import Skip, SkipTracker, use_skip_tracker
from fxpipe.errors import StageError
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.backward import differentiable
from fxpipe.runtime.drawing import drawing
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.recomputing import checkpointing, recomputing, versions
from fxpipe.runtime.swapping import swapped

# Calls a partition with a value, which is a tensor or a tuple, and checks what it returns.
Caller = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, slots=True)
class Partition:
    """Partition `index`, and the device that its lane computes on.

    `popped` are the skips that come from other partitions, `stashed` those that go to others, each
    with the other's index.
    """

    index: int
    module: nn.Module
    device: torch.device
    popped: Mapping[Skip, int]
    stashed: Mapping[Skip, int]
    written: Written


class Run:
    """The function for values of the form `given` and skips of the form `skips`.

    `made` are the forms of what it last returned. It holds no tensors, since the graph holds it
    until backward. Unless it `draws`, random numbers are those of torch's own generators.
    """

    def __init__(
        self, partition: Partition, call: Caller, given: Form, skips: Form, draws: bool
    ) -> None:
        self.partition = partition
        self._call = call
        self._given = given
        self._skips = skips
        self._draws = draws
        self.made: tuple[Form, Form]

    def __call__(
        self, tensors: Sequence[Tensor], random: RandomStream
    ) -> tuple[list[Tensor], RandomStream]:
        """The outputs, and where the random numbers end."""
        partition, n = self.partition, len(self._given.places)
        popped = zip(partition.popped, self._skips.fill(tensors[n:]), strict=True)
        tracker = SkipTracker(dict(popped))
        drawn = (
            drawing(random, partition.device, partition.module, fixed=False)
            if self._draws
            else nullcontext()
        )
        with use_skip_tracker(tracker), drawn as mode:
            value = self._call(partition.module, self._given.fill(tensors[:n]))
        form, outputs = split(value)
        skips, stashed = split(tuple(tracker.tensors.pop(skip) for skip in partition.stashed))
        self.made = form, skips
        return [*outputs, *stashed], random if mode is None else mode.end


class Twice:
    """A run that checkpointing does twice, with equal random numbers, autocast and buffers."""

    def __init__(self, run: Run, random: RandomStream) -> None:
        self._run = run
        self._random = random
        self._ambient = Ambient.capture()
        self._buffers: dict[str, Tensor] = {}

    def first(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], RandomStream]:
        """The outputs, without a graph. Raises StageError."""
        partition = self._run.partition
        before, watch = versions(inputs), partition.written.watch(partition.module)
        with checkpointing(self._ambient):
            outputs, end = self._run(inputs, self._random)
        for tensor, was, now in zip(inputs, before, versions(inputs), strict=True):
            # Of one with a gradient torch itself tells in the recomputation.
            if was != now and not tensor.requires_grad:
                raise StageError(
                    f"partition {partition.index} writes its input in place, so it can't be "
                    "computed again: make that op not in-place, or give checkpoint='never'"
                )
        self._buffers = watch.end()
        return [output.detach() for output in outputs], end

    def gradients(self, outputs: Sequence[Tensor], given: Sequence[bool]) -> list[bool]:
        """Which outputs may have a gradient: nothing is known but their dtypes."""
        return [differentiable(output) for output in outputs]

    def again(self, inputs: Sequence[Tensor], bound: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The outputs with their graph; what it writes into buffers is dropped."""
        module = self._run.partition.module
        buffers = {name: value.clone() for name, value in self._buffers.items()}
        with recomputing(self._ambient), swapped(module, "_buffers", buffers):
            outputs, _ = self._run(inputs, self._random)
        return tuple(outputs)
