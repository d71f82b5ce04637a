"""What `GPipe` and `Pipe` have in common: partitions on devices, and a forward through them."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from fxpipe.compat.buffers import Written
from fxpipe.compat.forward import Forward
from fxpipe.compat.microbatch import gather
from fxpipe.compat.partition import Caller, Partition
from fxpipe.compat.skip.layout import inspect_skip_layout
from fxpipe.runtime import stream
from fxpipe.runtime.batchnorm import deferred
from fxpipe.runtime.copy import Links, new_copy_streams
from fxpipe.runtime.lanes import Lanes
from fxpipe.runtime.random import RandomStream, microbatch_seeds
from fxpipe.runtime.stream import Stream

Self = TypeVar("Self", bound="Partitioned")


class Partitioned(nn.Module):
    """Consecutive layers on a device each, which micro-batches go through.

    Like the `nn.Sequential` it was made from it has a length, layers by index, and iteration.
    """

    #: The partitions.
    partitions: nn.ModuleList
    #: The device of each partition; the last one is the output's.
    devices: list[torch.device]
    #: The number of micro-batches.
    chunks: int
    #: Which micro-batches are computed again in backward: 'always', 'except_last' or 'never'.
    checkpoint: str

    def __init__(self, chunks: int, checkpoint: str) -> None:
        super().__init__()
        self.chunks = int(chunks)
        self.checkpoint = str(checkpoint)
        if self.chunks <= 0:
            raise ValueError("number of chunks must be positive integer")
        if self.checkpoint not in ("always", "except_last", "never"):
            raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")

    def _place(self, partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        self.partitions = nn.ModuleList(partitions)
        self.devices = list(devices)
        self._routes = inspect_skip_layout(partitions)
        self._written = [Written() for _ in partitions]
        self._workers: tuple[Lanes, list[list[Stream]]] | None = None
        # Whether its forward draws random numbers, in training and else; unknown at first.
        self._draws: dict[bool, bool] = {}

    def _run(self, pieces: Sequence[Any], call: Caller) -> Any:
        """The output for micro-batches, of which there may be fewer than `chunks`."""
        if self._workers is None:
            streams = new_copy_streams(self.devices, self.chunks)
            self._workers = Lanes(self.devices), streams
        lanes, copies = self._workers
        m = len(pieces)
        if self.training:
            for norm in deferred(self.partitions):
                norm.begin(m)
        n_recomputed = self._n_recomputed(m)
        draws = self._draws.get(self.training, True)
        routes = self._routes
        partitions = [
            Partition(j, module, self.devices[j], routes.popped[j], routes.stashed[j], written)
            for j, (module, written) in enumerate(zip(self.partitions, self._written, strict=True))
        ]
        links = Links(self.devices, copies)
        forward = Forward(partitions, call, links, m, n_recomputed, draws)
        before = self._random_states()
        seeds = microbatch_seeds(m) if draws else [0] * m
        for i, (piece, seed) in enumerate(zip(pieces, seeds, strict=True)):
            forward.enter(i, piece, RandomStream(seed))
        lanes.run([partial(forward.run_lane, j) for j in range(len(self.devices))], forward.stop)
        results = [forward.result(i) for i in range(m)]
        if draws:
            drawn = any(result.random.states for result in results)
            if not drawn:
                # What draws no random numbers leaves the caller's alone.
                torch.set_rng_state(before[0])
            self._draws.setdefault(self.training, drawn)
        elif not all(map(torch.equal, before, self._random_states())):
            # It draws after all, as when a dropout is switched on: only now is that recomputed.
            self._draws[self.training] = True
            if n_recomputed:
                return self._run(pieces, call)
        return gather([result.value for result in results])

    def _random_states(self) -> list[Tensor]:
        devices = dict.fromkeys([torch.device("cpu"), *self.devices])
        return [stream.generator(device).get_state() for device in devices]

    def _n_recomputed(self, m: int) -> int:
        if not (self.training and torch.is_grad_enabled()):
            return 0
        return {"always": m, "except_last": m - 1, "never": 0}[self.checkpoint]

    def __len__(self) -> int:
        return sum(len(partition) for partition in self._sequentials())

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self._sequentials():
            yield from partition

    def _sequentials(self) -> Iterator[nn.Sequential]:
        for partition in self.partitions:
            assert isinstance(partition, nn.Sequential)
            yield partition

    def __getstate__(self) -> dict[str, Any]:
        """All but the worker threads, so that copies and pickles can be made."""
        return self.__dict__ | {"_workers": None}

    def cuda(self: Self, device: Any = None) -> Self:
        """Not allowed, since each partition has its device."""
        self._refuse_to_move()

    def cpu(self: Self) -> Self:
        """Not allowed, since each partition has its device."""
        self._refuse_to_move()

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """As in `nn.Module`, but dtypes and memory formats alone. Raises TypeError for devices."""
        moved = (torch.device, int, str, torch.Tensor)
        if {"device", "tensor"} & set(kwargs) or isinstance(next(iter(args), None), moved):
            self._refuse_to_move()
        return super().to(*args, **kwargs)

    def _refuse_to_move(self) -> NoReturn:
        raise TypeError(
            "denied to move parameters and buffers, because "
            f"{type(self).__name__} should manage device placement"
        )


def verify_module(module: nn.Module) -> None:
    """Raise TypeError for what is no Sequential, ValueError for one that holds a child twice."""
    if not isinstance(module, nn.Sequential):
        raise TypeError("module must be nn.Sequential to be partitioned")
    if len(list(module.named_children())) != len(module):
        raise ValueError("module with duplicate children is not supported")
