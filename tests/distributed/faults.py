"""Ranks that come to harm: each case has processes of its own, forked from this one.

`python faults.py FOLDER CASE...` runs the cases side by side with the package in FOLDER, and prints
as JSON by case of each rank: its exit code, None if it was stopped, and what it has written.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import toys
from forked import PATIENCE_S, Rank, ends, port, start

from fxpipe import checkpoint
from fxpipe.runtime import load
from fxpipe.runtime.distributed.pipeline import DistributedPipeline

N = 3
TIMEOUT_S = 8.0


def strike(number: signal.Signals) -> None:
    time.sleep(2)  # until all have told where they are
    os.kill(os.getpid(), number)
    time.sleep(PATIENCE_S)  # another thread may be struck first, and this one go on


def stop() -> None:
    strike(signal.SIGSTOP)


def kill() -> None:
    strike(signal.SIGKILL)


def doze() -> None:
    time.sleep(3 * TIMEOUT_S)


def fail() -> None:
    raise ValueError("a bad row")


def run(case: str, rank: int, folder: Path) -> None:
    """What a script does; harm comes to one rank on the way."""
    (x,) = toys.CHAIN.inputs()
    if (case, rank) == ("absent", 2):
        stop()
    if case == "elsewhere":
        dist.init_process_group("gloo")
        if rank == 2:
            stop()
    shares = {"dp": N, "fully_shard": "gathering" in case}
    of_replicas = case == "replica killed" or "gathering" in case
    package, replicas = (folder / "replica", shares) if of_replicas else (folder, {})
    pipe = load(package, distributed=True, timeout_s=TIMEOUT_S, **replicas)
    assert isinstance(pipe, DistributedPipeline)
    pipe.double()
    pipe.step(x, loss_fn=toys.mean_loss)
    if (case, rank) == ("stopped outside", 2):
        stop()
    if (case, rank) == ("a batch fewer", 2):
        checkpoint.save(folder / "last", pipe)
    if case == "stopped saving":
        if rank == 1:
            checkpoint.dcp_save = lambda *_, **__: stop()  # type: ignore[assignment]
        checkpoint.save(folder / "last", pipe)
    in_stage = {"failed": (1, fail), "killed": (1, kill), "stopped": (1, stop)}
    in_stage |= {"replica killed": (1, kill)}
    in_stage |= {"keeper stopped": (0, stop), "slow": (1, doze), "told to end": (1, doze)}
    in_stage |= {"killed gathering": (1, kill), "stopped gathering": (1, stop)}
    if (case, rank) == ("told to end", 2):
        threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    harmed, harm = in_stage.get(case, (None, None))
    if rank == harmed and harm is not None:
        *_, layer = pipe._stages[0].module.modules()
        layer.register_forward_pre_hook(at_third(harm))
    pipe.step(x, loss_fn=toys.mean_loss)


def at_third(harm: Callable[[], None]) -> Callable[..., None]:
    """A hook that does harm when it is called for the third time."""
    seen = []

    def hook(*_: object) -> None:
        seen.append(None)
        if len(seen) == 3:
            harm()

    return hook


def ranks(folder: Path, case: str) -> Iterator[Rank]:
    world = {"WORLD_SIZE": str(N), "LOCAL_WORLD_SIZE": str(N)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port()}
    for rank in range(N):
        yield Rank(f"{case} {rank}", {**world, "RANK": str(rank)}, partial(run, case, rank, folder))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    started = start(folder, [rank for case in cases for rank in ranks(folder, case)])
    if started is not None:
        found = ends(folder, started)
        print(json.dumps({case: found[N * k : N * (k + 1)] for k, case in enumerate(cases)}))
