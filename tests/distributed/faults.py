"""Ranks that come to harm: each case has processes of its own, forked from this one.

`python faults.py FOLDER CASE...` runs the cases side by side with the package in FOLDER, and prints
as JSON by case of each rank: its exit code, None if it was stopped, and what it has written.
"""

import gc
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import toys

from fxpipe import checkpoint
from fxpipe.runtime import load
from fxpipe.runtime.distributed import DistributedPipeline

N = 3
TIMEOUT_S = 8.0
PATIENCE_S = 90.0


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
    pipe = load(folder, distributed=True, timeout_s=TIMEOUT_S)
    assert isinstance(pipe, DistributedPipeline)
    pipe.double()
    pipe.step(x, loss_fn=toys.mean_loss)
    if (case, rank) == ("stopped outside", 2):
        stop()
    if case == "stopped saving":
        if rank == 1:
            checkpoint.dcp_save = lambda *_, **__: stop()  # type: ignore[assignment]
        checkpoint.save(folder / "last", pipe)
    in_stage = {"failed": (1, fail), "killed": (1, kill), "stopped": (1, stop)}
    in_stage |= {"keeper stopped": (0, stop), "slow": (1, doze), "told to end": (1, doze)}
    if (case, rank) == ("told to end", 2):
        threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    harmed, harm = in_stage.get(case, (None, None))
    if rank == harmed and harm is not None:
        *_, layer = pipe._stages[-1].module.modules()
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


def port() -> str:
    """One that is free, and that no connection is given by chance."""
    while True:
        with socket.socket() as server:
            number = random.randint(15000, 30000)
            try:
                server.bind(("127.0.0.1", number))
            except OSError:
                continue
            return str(number)


def start(folder: Path, cases: list[str]) -> dict[int, tuple[str, int]] | None:
    """The processes that were started; None in each of them, which then ends as scripts do."""
    started = {}
    gc.freeze()
    for case in cases:
        world = {"WORLD_SIZE": str(N), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port()}
        for rank in range(N):
            pid = os.fork()
            if pid == 0:
                os.environ.update(world, RANK=str(rank), LOCAL_WORLD_SIZE=str(N))
                file = os.open(folder / f"{case} {rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(file, 1)
                os.dup2(file, 2)
                run(case, rank, folder)
                return None
            started[pid] = case, rank
    return started


def watch(folder: Path, started: dict[int, tuple[str, int]]) -> None:
    """Wait until all have ended, or stopped; the latter are killed then."""
    codes: dict[int, int | None] = {}
    until = time.monotonic() + PATIENCE_S
    while len(codes) < len(started) and time.monotonic() < until:
        for pid in started.keys() - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if done:
                codes[pid] = None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    found: dict[str, list[tuple[int | str | None, str]]] = {}
    for pid, (case, rank) in started.items():
        if codes.get(pid) is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        text = (folder / f"{case} {rank}").read_text()
        found.setdefault(case, []).append((codes.get(pid, "did not end"), text))
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *cases = sys.argv[1:]
    started = start(Path(folder), cases)
    if started is not None:
        watch(Path(folder), started)
