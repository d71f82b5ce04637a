"""The forward of all micro-batches through all partitions, autograd watching.

Partition j runs micro-batch i in clock cycle k = i + j, each on its own lane, as torchgpipe does
(sections 2.2 and 3); what crosses from one to another is known only once it is there. What a
partition stashes goes straight to the one that pops it, as one more output and input of theirs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compat.microbatch import Form, split
from fxpipe.compat.skip.layout import Routes
from fxpipe.compat.skip.tracker import Skip, SkipTracker, use_skip_tracker
from fxpipe.errors import StageError
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.checkpoint import checkpointed
from fxpipe.runtime.copy import Links
from fxpipe.runtime.dependency import Turns
from fxpipe.runtime.mailbox import Mailbox, StoppedError
from fxpipe.runtime.random import RandomStream, drawing
from fxpipe.runtime.recomputing import checkpointing, recomputing, versions

# Calls a partition with a value, which is a tensor or a tuple, and checks what it returns.
Caller = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, slots=True)
class Partition:
    """Partition `index` and the device that its lane computes on."""

    index: int
    module: nn.Module
    device: torch.device


@dataclass(frozen=True, slots=True)
class Parcel:
    """A micro-batch's value between partitions, and where its random numbers stand."""

    atomic: bool
    form: Form
    tensors: list[Tensor]
    random: RandomStream

    @classmethod
    def of(cls, value: Any, random: RandomStream) -> "Parcel":
        """The parcel of a tensor or a tuple."""
        atomic = not isinstance(value, tuple)
        return cls(atomic, *split((value,) if atomic else value), random)

    @property
    def value(self) -> Any:
        """The tensor or the tuple."""
        values = self.form.fill(self.tensors)
        return values[0] if self.atomic else tuple(values)


class Forward:
    """One forward of `m` micro-batches, of which the first `n_recomputed` are computed twice.

    Unless it `draws`, random numbers are those of torch's own generators.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        call: Caller,
        routes: Routes,
        links: Links,
        m: int,
        n_recomputed: int,
        draws: bool,
    ) -> None:
        self._partitions = partitions
        self._call = call
        self._routes = routes
        self._links = links
        self._m = m
        self._n_recomputed = n_recomputed
        self._draws = draws
        self._turns = [Turns() for _ in partitions]
        # The clock cycle after which nothing is to begin.
        self._last_cycle = m + len(partitions)
        self._failed = False
        # One for each lane and, at the end, the caller's.
        self._mail: list[Mailbox[tuple[Skip | None, int]]] = [
            Mailbox() for _ in (*partitions, None)
        ]

    def enter(self, i: int, value: Any, random: RandomStream) -> None:
        """Give the first partition micro-batch i."""
        self._mail[0].put((None, i), Parcel.of(value, random))

    def result(self, i: int) -> Parcel:
        """What the last partition made of micro-batch i; waits for it."""
        parcel: Parcel = self._mail[-1].take((None, i))
        return parcel

    def stop(self) -> None:
        """Make every lane end: after the clock cycle in which one failed, or else at once."""
        if not self._failed:
            self._last_cycle = -1
        for mailbox in self._mail:
            mailbox.stop()

    def run_lane(self, j: int) -> None:
        """Run partition j on all micro-batches."""
        for i in range(self._m):
            if i + j > self._last_cycle:
                raise StoppedError
            try:
                self._run(j, i)
            except StoppedError:
                raise
            except Exception as error:
                error.add_note(f"in partition {j}, micro-batch {i}")
                self._failed = True
                self._last_cycle = min(self._last_cycle, i + j)
                raise

    def _take(self, j: int, skip: Skip | None, i: int) -> Any:
        while True:
            try:
                return self._mail[j].take((skip, i))
            except StoppedError:
                # Of a cycle that is to end, all that it takes still comes.
                if i + j > self._last_cycle:
                    raise

    def _run(self, j: int, i: int) -> None:
        parcel: Parcel = self._take(j, None, i)
        popped = self._routes.popped[j]
        tensors = [self._receive(tensor, j - 1, j, i) for tensor in parcel.tensors]
        skips, skipped = split([self._pop(skip, popped[skip], j, i) for skip in popped])
        run = _Run(
            self._partitions[j],
            self._call,
            (parcel.atomic, parcel.form),
            (tuple(popped), skips),
            tuple(self._routes.stashed[j]),
            self._draws,
        )
        inputs = self._turns[j].begin([*tensors, *skipped])
        if i < self._n_recomputed:
            outputs, random = checkpointed(_Twice(run, parcel.random), inputs)
        else:
            outputs, random = run(inputs, parcel.random)
        self._send(j, i, run, self._turns[j].end(outputs), random or parcel.random)

    def _send(
        self, j: int, i: int, run: "_Run", outputs: list[Tensor], random: RandomStream
    ) -> None:
        (atomic, form), stashes = run.made
        n, last = len(form.places), len(self._partitions) - 1
        target = min(j + 1, last)
        sent = [self._links.send(tensor, j, target, i) for tensor in outputs[:n]]
        self._mail[j + 1].put((None, i), Parcel(atomic, form, sent, random))
        values = stashes.fill(outputs[n:])
        for (skip, target), value in zip(self._routes.stashed[j].items(), values, strict=True):
            if value is not None:
                value = self._links.send(value, j, target, i)
            self._mail[target].put((skip, i), value)

    def _pop(self, skip: Skip, source: int, target: int, i: int) -> Tensor | None:
        tensor: Tensor | None = self._take(target, skip, i)
        return None if tensor is None else self._receive(tensor, source, target, i)

    def _receive(self, tensor: Tensor, source: int, target: int, i: int) -> Tensor:
        if source < 0:
            # The caller's are on the first partition's device, or come there as they are.
            return tensor.to(self._partitions[target].device)
        return self._links.receive(tensor, source, target, i)


class _Run:
    """A partition's forward on one micro-batch as a function from tensors to tensors.

    `made` is what the outputs are to be filled in: the value's form, and that of the stashes. It
    holds no tensor, since the graph holds it until backward.
    """

    def __init__(
        self,
        partition: Partition,
        call: Caller,
        given: tuple[bool, Form],
        popped: tuple[tuple[Skip, ...], Form],
        stashed: tuple[Skip, ...],
        draws: bool,
    ) -> None:
        self.partition = partition
        self._call = call
        self._given = given
        self._popped = popped
        self._stashed = stashed
        self._draws = draws
        self.made: tuple[tuple[bool, Form], Form]

    def __call__(
        self, tensors: Sequence[Tensor], random: RandomStream
    ) -> tuple[list[Tensor], RandomStream]:
        (atomic, form), (skips, skip_form) = self._given, self._popped
        values = form.fill(tensors[: len(form.places)])
        popped = skip_form.fill(tensors[len(form.places) :])
        tracker = SkipTracker(dict(zip(skips, popped, strict=True)))
        drawn = drawing(random, self.partition.device) if self._draws else nullcontext()
        with use_skip_tracker(tracker), drawn as mode:
            value = self._call(self.partition.module, values[0] if atomic else tuple(values))
        result = Parcel.of(value, random if mode is None else mode.end)
        stashes, stashed = split([tracker.tensors.pop(skip) for skip in self._stashed])
        self.made = (result.atomic, result.form), stashes
        return [*result.tensors, *stashed], result.random


class _Twice:
    """A run that checkpointing does twice, with equal random numbers and autocast."""

    def __init__(self, run: _Run, random: RandomStream) -> None:
        self._run = run
        self._random = random
        self._ambient = Ambient.capture()

    def first(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], RandomStream]:
        """The outputs, without a graph. Raises StageError."""
        before = versions(inputs)
        with checkpointing(self._ambient):
            outputs, end = self._run(inputs, self._random)
        for tensor, was, now in zip(inputs, before, versions(inputs), strict=True):
            # Of one with a gradient torch itself tells in the recomputation.
            if was != now and not tensor.requires_grad:
                raise StageError(
                    f"partition {self._run.partition.index} writes its input in place, so it "
                    "can't be computed again: make that op not in-place, or give "
                    "checkpoint='never'"
                )
        return [output.detach() for output in outputs], end

    def again(self, inputs: Sequence[Tensor], bound: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The outputs with their graph."""
        with recomputing(self._ambient):
            outputs, _ = self._run(inputs, self._random)
        return tuple(outputs)
