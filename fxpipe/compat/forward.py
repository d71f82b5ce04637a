"""The forward of all micro-batches through all partitions, autograd watching.

Partition j runs micro-batch i in clock cycle k = i + j, each on its own lane, as torchgpipe does
(sections 2.2 and 3); what crosses from one to another is known only once it is there. What a
partition stashes goes straight to the one that pops it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxpipe.compat.microbatch import Form, split
from fxpipe.compat.partition import Caller, Partition, Run, Twice
from fxpipe.compat.skip.tracker import Skip
from fxpipe.runtime.checkpoint import checkpointed
from fxpipe.runtime.copy import Links
from fxpipe.runtime.dependency import Turns
from fxpipe.runtime.mailbox import Mailbox, StoppedError
from fxpipe.runtime.random import RandomStream


@dataclass(frozen=True, slots=True)
class Parcel:
    """A micro-batch's value between partitions, and where its random numbers stand."""

    form: Form
    tensors: list[Tensor]
    random: RandomStream

    @property
    def value(self) -> Any:
        """The tensor or the tuple."""
        return self.form.fill(self.tensors)


class Forward:
    """One forward of `m` micro-batches, of which the first `n_recomputed` are computed twice.

    Unless it `draws`, random numbers are those of torch's own generators.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        call: Caller,
        links: Links,
        m: int,
        n_recomputed: int,
        draws: bool,
    ) -> None:
        self._partitions = partitions
        self._call = call
        self._links = links
        self._m = m
        self._n_recomputed = n_recomputed
        self._draws = draws
        self._turns = [Turns() for _ in partitions]
        # The clock cycle after which nothing is to begin.
        self._last_cycle = m + len(partitions)
        self._failed = False
        # One for each lane and, at the end, the caller's.
        self._mail: list[Mailbox[tuple[Skip | None, int]]] = [Mailbox() for _ in (*partitions, 0)]

    def enter(self, i: int, value: Any, random: RandomStream) -> None:
        """Give the first partition micro-batch i."""
        self._mail[0].put((None, i), Parcel(*split(value), random))

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
                self._run(self._partitions[j], i)
            except StoppedError:
                raise
            except Exception as error:
                error.add_note(f"in partition {j}, micro-batch {i}")
                self._failed = True
                self._last_cycle = min(self._last_cycle, i + j)
                raise

    def _run(self, partition: Partition, i: int) -> None:
        j = partition.index
        parcel: Parcel = self._take(j, None, i)
        tensors = [self._receive(tensor, j - 1, j, i) for tensor in parcel.tensors]
        popped = partition.popped.items()
        form, skips = split(tuple(self._pop(skip, source, j, i) for skip, source in popped))
        run = Run(partition, self._call, parcel.form, form, self._draws)
        inputs = self._turns[j].begin([*tensors, *skips])
        if i < self._n_recomputed:
            outputs, random = checkpointed(Twice(run, parcel.random), inputs)
        else:
            outputs, random = run(inputs, parcel.random)
        self._send(run, i, self._turns[j].end(outputs), random or parcel.random)

    def _send(self, run: Run, i: int, outputs: list[Tensor], random: RandomStream) -> None:
        j, (form, skips) = run.partition.index, run.made
        n, following = len(form.places), min(j + 1, len(self._partitions) - 1)
        sent = [self._links.send(tensor, j, following, i) for tensor in outputs[:n]]
        self._mail[j + 1].put((None, i), Parcel(form, sent, random))
        stashed = zip(run.partition.stashed.items(), skips.fill(outputs[n:]), strict=True)
        for (skip, target), tensor in stashed:
            if tensor is not None:
                tensor = self._links.send(tensor, j, target, i)
            self._mail[target].put((skip, i), tensor)

    def _pop(self, skip: Skip, source: int, target: int, i: int) -> Tensor | None:
        tensor: Tensor | None = self._take(target, skip, i)
        return None if tensor is None else self._receive(tensor, source, target, i)

    def _receive(self, tensor: Tensor, source: int, target: int, i: int) -> Tensor:
        if source < 0:
            # The caller's are on the first partition's device, or come there as they are.
            return tensor.to(self._partitions[target].device)
        return self._links.receive(tensor, source, target, i)

    def _take(self, j: int, skip: Skip | None, i: int) -> Any:
        while True:
            try:
                return self._mail[j].take((skip, i))
            except StoppedError:
                # Of a cycle that is to end, all that it takes still comes.
                if i + j > self._last_cycle:
                    raise
