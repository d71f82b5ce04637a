"""Checkpoints that a process dies over: `python dying.py PACKAGE CHECKPOINT`.

Of one process after the other, each saving a version of its own, the k-th is killed before it
touches the file system for the k-th time; until one is not. After each, what can be loaded is one
version, whole: the last that was there before, or the one that was being saved. First each finds
what the one before it left; then, once more, what a save left that nobody disturbed.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from fxpipe import checkpoint
from fxpipe.runtime import load

TOUCHING = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def die_at(k: int, folder: Path) -> None:
    """Let this process be killed before its k-th touch of what is in `folder`."""
    touched = itertools.count()

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event in TOUCHING and str(args[0]).startswith(str(folder)) and next(touched) == k:
            print(f"killed at {event} {Path(str(args[0])).relative_to(folder)}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def fill(pipe: nn.Module, version: float) -> None:
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(version)


def main(package: Path, last: Path) -> None:
    pipe = load(package)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
    for parameter in pipe.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for undisturbed in (False, True):
        kill_each(pipe, optimizer, last, undisturbed)


def kill_each(
    pipe: nn.Module, optimizer: torch.optim.Optimizer, last: Path, undisturbed: bool
) -> None:
    for k in itertools.count():
        if k == 0 or undisturbed:
            version = k
            fill(pipe, version)
            checkpoint.save(last, pipe, optimizer, version)
        pid = os.fork()
        if pid == 0:
            fill(pipe, k + 1)
            die_at(k, last.parent)
            checkpoint.save(last, pipe, optimizer, k + 1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert checkpoint.exists(last)
        found = checkpoint.load(last, pipe, optimizer)
        assert found in (version, k + 1), (found, version, k)
        assert all((parameter == found).all() for parameter in pipe.parameters())
        version = found
        if code == 0:
            assert version == k + 1
            print("saved")
            return
        assert code == -signal.SIGKILL


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
