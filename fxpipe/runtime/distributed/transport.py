"""Tensors between ranks, on the devices that they are on: by gloo on CPUs, by NCCL on GPUs.

NCCL runs what goes through one group in the order in which each rank asks for it, and a receive
that is posted ahead would hold up a send the other way; gloo's thread turns on a connection's lock
while what has come there waits for a send. So each direction between two ranks has a group of its
own, through which the sender's order is the receiver's. NCCL sets one up as it is first used, and
keeps the caller until the other rank comes there too (pytorch#136248): receives that are posted
ahead would wait for each other in a ring, so a number goes through each as it is made. A wait on a
GPU is the current stream's, not the caller's.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.runtime import stream
from fxpipe.runtime.distributed.messages import SENT_AT_ONCE_BYTES
from fxpipe.runtime.distributed.patience import LOOK_S
from fxpipe.runtime.distributed.ranks import Ranks

_LOOK_S = 2e-4  # how often a GPU is asked whether it is done

Tensors = list[Tensor | None]


class Transport:
    """This rank's, for tensors on `device` and, by gloo, those on the CPU."""

    def __init__(
        self, ranks: Ranks, device: torch.device, routes: Collection[tuple[int, int]]
    ) -> None:
        """`routes` are the source and target of all messages; all ranks make theirs together."""
        self.device = device
        self._ranks = ranks
        self._groups: dict[tuple[int, int], Any] = {}
        self._begun: dict[int, list[tuple[Any, Tensor]]] = defaultdict(list)  # by target
        # How many have begun to be sent to each rank, and how many have left.
        self._n_begun: Counter[int] = Counter()
        self._n_left: Counter[int] = Counter()
        self._one_left = threading.Condition()
        if device.type == "cuda":
            # Where threads wait for what has been sent, so that no stage's stream does.
            self._waiting = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for route in sorted(routes):
                for replica in range(ranks.dp):
                    group = ranks.new_group([replica * ranks.size + rank for rank in route])
                    if group is not None:
                        self._groups[route] = group
            ranks.together(self._set_up)

    def send(self, tensor: Tensor, target: int, tag: int) -> int:
        """Begin to send what is ready on the current stream; gives as which of those to `target`.

        Its memory is held until it has left, and for small messages until some more have.
        """
        group, place = self._route(tensor, (self._ranks.rank, target), target)
        work = dist.isend(tensor, group=group, tag=tag, group_dst=place)
        assert work is not None
        begun = self._begun[target]
        begun.append((work, tensor))
        if sum(tensor.nbytes for _, tensor in begun) >= SENT_AT_ONCE_BYTES:
            self._await(target)
        self._n_begun[target] += 1
        return self._n_begun[target]

    def leave(self, target: int, n: int, check: Callable[[], None]) -> None:
        """Return once the first n sent to `target` have left, if from a CPU; `check` may raise.

        A GPU's leave in the order of its streams.
        """
        if self.device.type != "cpu" or self._n_left[target] >= n:
            return
        self._await(target)
        with self._one_left:
            while not self._one_left.wait_for(lambda: self._n_left[target] >= n, LOOK_S):
                check()

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        """Begin to receive into `tensor`; gives what to wait for."""
        group, place = self._route(tensor, (source, self._ranks.rank), source)
        return dist.irecv(tensor, group=group, tag=tag, group_src=place)

    def finish(self, targets: Collection[int], check: Callable[[], None]) -> None:
        """Return once all sent to `targets` has left and all received is here; `check` may raise.

        A GPU that waits for a rank which is lost would keep who asks it for anything.
        """
        for target in targets:
            self._await(target)
        self._ranks.flush(targets, check)
        if self.device.type == "cuda":
            done = torch.cuda.current_stream(self.device).record_event()
            while not done.query():
                check()
                time.sleep(_LOOK_S)

    def gather(self, gather: Callable[[Tensors], list[Tensors]], mine: Tensors) -> list[Tensors]:
        """What ranks `gather`, here."""
        found = gather([None if tensor is None else tensor.cpu() for tensor in mine])
        return [[None if t is None else t.to(self.device) for t in tensors] for tensors in found]

    def _set_up(self) -> None:
        """Use each group once.

        All ranks take theirs in one order, so that none waits in a ring: 0 meets 1 while 2 meets 3.
        """
        for route in sorted(self._groups, key=lambda route: (min(route) % 2, route)):
            group = self._groups[route]
            number, other = torch.zeros(1, device=self.device), 1 - group.rank()
            if route[0] == self._ranks.rank:
                work = dist.isend(number, group=group, group_dst=other)
            else:
                work = dist.irecv(number, group=group, group_src=other)
            assert work is not None
            work.wait()
        stream.synchronize(self.device)

    def _route(self, tensor: Tensor, route: tuple[int, int], partner: int) -> tuple[Any, int]:
        """The group, and the partner's rank in it."""
        if tensor.device.type == "cpu":
            if route[0] < route[1]:
                return self._ranks.group, partner
            return self._ranks.world_group, self._ranks.in_world(partner)
        group = self._groups[route]
        return group, 1 - group.rank()

    def _await(self, target: int) -> None:
        """Let a thread wait for what has begun."""
        if begun := self._begun.pop(target, None):
            self._ranks.sending[target].put(partial(self._sent, target, begun))

    def _sent(self, target: int, begun: list[tuple[Any, Tensor]]) -> None:
        while begun:
            work, tensor = begun.pop(0)
            if tensor.device.type == "cpu":
                work.wait()
                del tensor
                with self._one_left:
                    self._n_left[target] += 1
                    self._one_left.notify()
                continue
            with stream.use_streams([self._waiting]):
                work.wait()
            self._waiting.synchronize()
