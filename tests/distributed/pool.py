"""A few processes that wait for work, so that many tests share one start."""

import gc
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fxpipe.runtime.distributed.rendezvous import backend

PATIENCE_S = 300  # a first job imports what it needs, on a machine that may be busy


class Pool:
    """`size` ranks, with NCCL for what is on GPUs; `run` calls a function of a module on each."""

    def __init__(self, size: int, folder: Path) -> None:
        context = mp.get_context("spawn")
        self._orders = [context.Queue() for _ in range(size)]
        self._results = [context.Queue() for _ in range(size)]
        self._processes = [
            context.Process(
                target=_work,
                args=(rank, size, str(folder), self._orders[rank], self._results[rank]),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank's call gives; raises AssertionError with the traceback of one's error."""
        for orders in self._orders:
            orders.put((function, args))
        found = [self._result(rank) for rank in range(len(self._results))]
        errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(found) if error]
        assert not errors, "\n".join(errors)
        return [result for _, result in found]

    def _result(self, rank: int) -> tuple[str | None, Any]:
        for _ in range(PATIENCE_S):
            with suppress(Empty):
                return self._results[rank].get(timeout=1)  # type: ignore[no-any-return]
            code = self._processes[rank].exitcode
            assert code is None, f"rank {rank} has gone, with exit code {code}"
        raise AssertionError(f"rank {rank} gave nothing for {PATIENCE_S} s")

    def close(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for process in self._processes:
            process.join(10)
            process.kill()


def _work(rank: int, size: int, folder: str, orders: Any, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    dist.init_process_group(
        backend(), init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    while (order := orders.get()) is not None:
        function, args = order
        try:
            results.put((None, function(*args)))
        except BaseException:
            results.put((traceback.format_exc(), None))
        gc.collect()  # pipelines have threads and connections
