"""torch.distributed.pipelining on two gloo processes, one thread each, driven from a third."""

import os
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from transformer import batch, blocks, loss_fn

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

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("spawn")
        ends = [context.Pipe() for _ in range(2)]
        self._connections = [ours for ours, _ in ends]
        self._processes = [
            context.Process(target=_work, args=(rank, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()

    def prepare(self, *workload: int) -> None:
        """Build hidden, layers, rows, sequence, m."""
        self._ask("prepare", *workload)

    def step(self, name: str) -> tuple[float, float]:
        """One step's milliseconds and its loss."""
        (ms, _), *_ = answers = self._ask("step", name)
        return ms, next(loss for _, loss in answers if loss is not None)

    def difference(self, gradients: Path) -> float:
        """How far the last step's gradients are from those in a file, relative to the largest."""
        return max(self._ask("difference", gradients))

    def close(self) -> None:
        """End the processes."""
        self._ask("close")
        for process in self._processes:
            process.join()

    def _ask(self, *command: object) -> list[Any]:
        for connection in self._connections:
            connection.send(command)
        return [connection.recv() for connection in self._connections]


def _work(rank: int, port: int, connection: Connection) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    worker = _Worker(rank)
    while True:
        command, *arguments = connection.recv()
        if command == "close":
            break
        connection.send(getattr(worker, command)(*arguments))
    dist.destroy_process_group()
    connection.send(None)


class _Worker:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def prepare(self, hidden: int, layers: int, rows: int, sequence: int, m: int) -> None:
        self._model = blocks(hidden, layers)
        self._x, self._target = batch(hidden, rows, sequence)
        self._schedules = {}
        for name, (schedule, held) in SCHEDULES.items():
            n = sum(map(len, held))
            size = layers // n
            stages = [
                PipelineStage(self._model[j * size : (j + 1) * size], j, n, torch.device("cpu"))
                for j in held[self._rank]
            ]
            given = stages[0] if len(held[0]) == 1 else stages
            has_last = any(stage.is_last for stage in stages)
            self._schedules[name] = schedule(given, m, loss_fn=loss_fn), has_last

    def step(self, name: str) -> tuple[float, float | None]:
        schedule, has_last = self._schedules[name]
        self._model.zero_grad()
        inputs = (self._x,) if self._rank == 0 else ()
        losses: list[Tensor] = []
        dist.barrier()
        started = time.perf_counter()
        if has_last:
            schedule.step(*inputs, target=self._target, losses=losses)
        else:
            schedule.step(*inputs)
        dist.barrier()
        ms = (time.perf_counter() - started) * 1e3
        return ms, torch.stack(losses).mean().item() if has_last else None

    def difference(self, gradients: Path) -> float:
        expected = torch.load(gradients, mmap=True)
        found = {n: p.grad for n, p in self._model.named_parameters() if p.grad is not None}
        return max(
            ((found[name] - expected[name]).abs().max() / expected[name].abs().max()).item()
            for name in found
        )
