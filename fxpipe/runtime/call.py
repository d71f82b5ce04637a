"""What the lanes share during one call: where values, gradients and random numbers go."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fxpipe.runtime.copy import Links
from fxpipe.runtime.mailbox import Mailbox
from fxpipe.runtime.portal import CALLER, Wire, Wires, add_gradients
from fxpipe.runtime.random import RandomStream, microbatch_seeds
from fxpipe.runtime.stage import Stage

Key = tuple[str, Wire | None, int, int]


class Call:
    """One call of the pipeline: its stages, the wires between them, its micro-batches' inputs.

    Stage `n` stands for the pipeline's end, which is on the last stage's lane.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        wires: Wires,
        links: Links,
        n_lanes: int,
        pieces: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self.stages = stages
        self.wires = wires
        self.n = len(stages)
        self.m = len(pieces)
        self._links = links
        self.pieces = pieces
        self._mailboxes: list[Mailbox[Key]] = [Mailbox() for _ in range(n_lanes)]
        self._random_stages = [stage.index for stage in stages if stage.spec.random]
        self._seeds = microbatch_seeds(self.m) if self._random_stages else []

    def lane(self, j: int) -> int:
        """The lane of stage j."""
        return self.stages[min(j, self.n - 1)].lane

    def device(self, j: int) -> torch.device:
        """The device of stage j."""
        return self.stages[min(j, self.n - 1)].device

    def check(self, lane: int) -> None:
        """Raise StoppedError if the lane shall not begin anything more."""
        self._mailboxes[lane].check()

    def stop(self) -> None:
        """Make every lane end at its next wait or action."""
        for mailbox in self._mailboxes:
            mailbox.stop()

    def send_value(self, wire: Wire, i: int, tensor: Tensor, gradient: bool) -> None:
        """Send micro-batch i's value to each stage that reads it, saying if it has a gradient."""
        for j in self.wires.readers[wire]:
            source, target = self.lane(wire.source), self.lane(j)
            sent = self._links.send(tensor, source, target, i)
            self._mailboxes[target].put(("value", wire, j, i), (sent, gradient))

    def value(self, wire: Wire, j: int, i: int) -> tuple[Tensor, bool]:
        """Micro-batch i's value on stage j, and whether it has a gradient; waits for it."""
        if wire.source == CALLER:
            piece = self.pieces[i][wire.value]
            return piece.to(self.device(j)), piece.requires_grad
        source, target = self.lane(wire.source), self.lane(j)
        tensor, gradient = self._mailboxes[target].take(("value", wire, j, i))
        return self._links.receive(tensor, source, target, i), gradient

    def send_gradient(self, wire: Wire, j: int, i: int, gradient: Tensor | None) -> None:
        """Send stage j's part of the gradient of micro-batch i's value back to its stage."""
        source, target = self.lane(j), self.lane(wire.source)
        if gradient is not None:
            gradient = self._links.send(gradient, source, target, i)
        self._mailboxes[target].put(("gradient", wire, j, i), gradient)

    def gradient(self, wire: Wire, i: int) -> Tensor | None:
        """The gradient of micro-batch i's value, all readers' parts added; waits for them."""
        target = self.lane(wire.source)
        parts: list[Tensor | None] = []
        for j in self.wires.readers.get(wire, ()):
            part = self._mailboxes[target].take(("gradient", wire, j, i))
            if part is not None:
                part = self._links.receive(part, self.lane(j), target, i)
            parts.append(part)
        return add_gradients(parts)

    def random(self, j: int, i: int) -> RandomStream | None:
        """Where micro-batch i's random numbers stand as stage j begins; None if it draws none."""
        if j not in self._random_stages:
            return None
        if j == self._random_stages[0]:
            return RandomStream(self._seeds[i])
        taken: RandomStream = self._mailboxes[self.lane(j)].take(("random", None, j, i))
        return taken

    def pass_random(self, j: int, i: int, random: RandomStream | None) -> None:
        """Hand the random numbers on to the next stage that draws some."""
        following = [k for k in self._random_stages if k > j]
        if random is not None and following:
            self._mailboxes[self.lane(following[0])].put(("random", None, following[0], i), random)
