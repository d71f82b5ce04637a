"""torch.distributed.pipelining on two gloo processes, one thread each, driven from a third."""

import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from transformer import batch, blocks, difference, loss_fn

# Each schedule, and the stages that each of the two processes holds.
SCHEDULES = {
    "GPipe": (ScheduleGPipe, ((0,), (1,))),
    "1F1B": (Schedule1F1B, ((0,), (1,))),
    "interleaved": (ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "interleaved ZB": (ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "ZBV": (ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}


class Peer:
    """The two processes. `prepare` a workload, then `step` by the schedule of a name."""

    def __init__(self, kind: "type[Rank] | None" = None) -> None:
        """Each process has an object of `kind`, a subclass of `Rank`, and does what it is asked."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("spawn")
        ends = [context.Pipe() for _ in range(2)]
        self._connections = [ours for ours, _ in ends]
        self._processes = [
            context.Process(target=_work, args=(kind or Rank, rank, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()

    def prepare(self, *workload: int) -> None:
        """Build hidden, layers, rows, sequence, m."""
        self.ask("prepare", *workload)

    def step(self, name: str) -> tuple[float, float]:
        """One step's milliseconds and its loss."""
        (ms, _), *_ = answers = self.ask("step", name)
        return ms, next(loss for _, loss in answers if loss is not None)

    def difference(self, gradients: Path) -> float:
        """How far the last step's gradients are from those in a file, relative to the largest."""
        return max(self.ask("difference", gradients))

    def close(self) -> None:
        """End the processes."""
        self.ask("close")
        for process in self._processes:
            process.join()

    def ask(self, *command: object) -> list[Any]:
        """What a method of each process's `Rank` gives."""
        for connection in self._connections:
            connection.send(command)
        return [connection.recv() for connection in self._connections]

    def first(self, *command: object) -> Any:
        """What the first process gives that is done; neither is of use afterwards."""
        for connection in self._connections:
            connection.send(command)
        found = wait(self._connections)[0].recv()
        for process in self._processes:
            process.kill()
        return found


def _work(kind: "type[Rank]", rank: int, port: int, connection: Connection) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    worker = kind(rank)
    while True:
        command, *arguments = connection.recv()
        if command == "close":
            break
        connection.send(getattr(worker, command)(*arguments))
    dist.destroy_process_group()
    connection.send(None)


class Pipelined:
    """This rank's stages of a model in equal parts, under the schedule of a name.

    With `compile`, torch.compile runs each part, as `fxpipe.load(..., compile=True)` has it run.
    """

    def __init__(
        self,
        name: str,
        model: nn.Sequential,
        rank: int,
        m: int,
        loss_fn: Callable[..., Tensor],
        compile: bool = False,
    ) -> None:
        schedule, held = SCHEDULES[name]
        n = sum(map(len, held))
        size = len(model) // n
        self.parts = [model[j * size : (j + 1) * size] for j in held[rank]]
        for part in self.parts if compile else ():
            part.compile(options={"cpp_wrapper": True})
        stages = [
            PipelineStage(part, j, n, torch.device("cpu"))
            for part, j in zip(self.parts, held[rank], strict=True)
        ]
        self._is_first = any(stage.is_first for stage in stages)
        self._is_last = any(stage.is_last for stage in stages)
        self._schedule = schedule(stages[0] if len(held[0]) == 1 else stages, m, loss_fn=loss_fn)

    def step(self, x: Tensor, target: Tensor) -> float | None:
        """A training step; its loss where the last stage is."""
        inputs = (x,) if self._is_first else ()
        if not self._is_last:
            self._schedule.step(*inputs, return_outputs=False)
            return None
        losses: list[Tensor] = []
        self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().item()


class Rank:
    """What one process does."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def prepare(self, hidden: int, layers: int, rows: int, sequence: int, m: int) -> None:
        self._m = m
        self._model = blocks(hidden, layers)
        self._x, self._target = batch(hidden, rows, sequence)
        self._theirs = {
            name: Pipelined(name, self._model, self._rank, m, loss_fn) for name in SCHEDULES
        }

    def step(self, name: str) -> tuple[float, float | None]:
        return self._timed(self._model, lambda: self._theirs[name].step(self._x, self._target))

    def difference(self, gradients: Path) -> float:
        named = self._stepped.named_parameters()
        found = {name: p.grad for name, p in named if p.grad is not None}
        return difference(found, torch.load(gradients, mmap=True))

    def _timed(
        self, module: nn.Module, step: Callable[[], float | None]
    ) -> tuple[float, float | None]:
        """Milliseconds of a step of all ranks, and what it gives."""
        self._stepped = module
        module.zero_grad()
        dist.barrier()
        started = time.perf_counter()
        loss = step()
        dist.barrier()
        return (time.perf_counter() - started) * 1e3, loss
