"""A call whose caller and end are on every rank, as where a runner's closures run.

Each rank computes the same around the pipeline. Its inputs each rank that needs one has itself, and
so the gradients of its outputs; what the stages make for the end, and their gradients of inputs,
goes to all ranks.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime.backward import as_reals
from fxpipe.runtime.call import Call
from fxpipe.runtime.copy import Links
from fxpipe.runtime.distributed.messages import Row, Send
from fxpipe.runtime.mailbox import Mailbox, Mirror
from fxpipe.runtime.portal import CALLER, Wire, Wires
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.stage import Stage

_SAMPLED = 64  # numbers of a tensor that are compared between ranks
_APART = 0.05  # of the largest: other data, weights or random numbers, not other rounding

# What was given to the pipeline, and some of its numbers.
Sample = tuple[str, Tensor | None]
Numbers = tuple[str, list[float] | None]


class ReplicatedCall(Call):
    """The call of a rank whose row is `row`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        wires: Wires,
        links: Links,
        m: int,
        elsewhere: Collection[int],
        row: Row,
    ) -> None:
        super().__init__(stages, wires, links, 1, m, elsewhere)
        self._sent = Counter(
            key for item in row if isinstance(item, Send) for key in item.message.keys
        )
        self.outbox.expect(self._sent)
        for j in (self.n, CALLER):
            own = self._mailboxes[j]
            assert isinstance(own, Mailbox)
            self._mailboxes[j] = Mirror(own, self.outbox)
        self.samples: list[Sample] = []

    def enter(self, i: int, piece: Mapping[str, Tensor], random: RandomStream | None) -> None:
        """Give micro-batch i's inputs to the stages of this rank that read them."""
        self.samples += sampled(i, piece)
        super().enter(i, piece, random)

    def send_gradient(self, wire: Wire, j: int, i: int, gradient: Tensor | None) -> None:
        """Send stage j's part back; the end's goes no further than this rank."""
        if j == self.n:
            name = f"another gradient of output {wire.value} in micro-batch {i}"
            self.samples.append((name, _some(gradient)))
        super().send_gradient(wire, j, i, gradient)

    def value(self, wire: Wire, j: int, i: int) -> tuple[Tensor, bool]:
        """As of any call; the closure may write into what it gets while that is being sent."""
        tensor, gradient = super().value(wire, j, i)
        shared = j == self.n and ("value", wire, j, i) in self._sent
        return (tensor.clone() if shared else tensor), gradient

    def gradient(self, wire: Wire, i: int) -> Tensor | None:
        """As of any call; an input's may become its `.grad` while that is being sent."""
        total = super().gradient(wire, i)
        if total is None or wire.source != CALLER:
            return total
        shared = any(("gradient", wire, j, i) in self._sent for j in self.wires.readers[wire])
        return total.clone() if shared else total


def sampled(i: int, piece: Mapping[str, Tensor]) -> list[Sample]:
    """Of micro-batch i's inputs."""
    return [(f"another {name} in micro-batch {i}", _some(value)) for name, value in piece.items()]


def numbers_of(samples: Sequence[Sample]) -> list[Numbers]:
    """The same for other ranks, which lack this one's device; waits for that."""
    return [(name, None if some is None else some.tolist()) for name, some in samples]


def refuse_differing(samples: Sequence[Sequence[Numbers]]) -> None:
    """Raise InputError, alike on all ranks, unless all ranks gave their pipeline the same."""
    for rank, found in enumerate(samples):
        for (name, own), (_, first) in zip(found, samples[0], strict=True):
            if _differ(own, first):
                raise InputError(
                    f"rank {rank}'s closure gave the pipeline {name} than rank 0's. Closures run "
                    "on every rank: give all the same batch, the same torch.manual_seed, and the "
                    "same weights around the pipeline"
                )


def _some(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, -(-len(flat) // _SAMPLED))]
    return as_reals(some).to(torch.float64).reshape(-1)


def _differ(own: list[float] | None, other: list[float] | None) -> bool:
    if own is None or other is None:
        return own is not other
    if len(own) != len(other):
        return True
    both = torch.tensor([own, other], dtype=torch.float64)
    largest = both.abs().amax() if own else 0.0
    return bool(((both[0] - both[1]).abs() > _APART * largest).any())
