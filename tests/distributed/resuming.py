"""Training that goes on from its last checkpoint: `torchrun resuming.py PACKAGE CHECKPOINT`.

The first time that torchrun starts it, rank 1 is killed between two checkpoints; the second time,
as it writes one. Then each rank compares its weights with those of an undisturbed run.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import toys

from fxpipe import checkpoint
from fxpipe.runtime import load
from fxpipe.runtime.distributed.pipeline import DistributedPipeline

STEPS = 5
START, RANK = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])


def say(text: str) -> None:
    """A line written at once: all ranks write into one stream."""
    print(f"rank {RANK} {text}\n", end="", flush=True)


def trained(package: Path, last: Path | None) -> DistributedPipeline:
    """The pipeline after all its steps, of which those before the checkpoint are not done again."""
    pipe = load(package, distributed=True)
    assert isinstance(pipe, DistributedPipeline)
    torch.manual_seed(2)
    pipe.load_state_dict(toys.NOISY.model().double().state_dict())
    optimizer = torch.optim.AdamW(pipe.parameters(), 0.05)
    begin = 0
    if last is not None and checkpoint.exists(last):
        extra = checkpoint.load(last, pipe, optimizer)
        begin = extra["step"]
        torch.set_rng_state(extra["random"])
        say(f"goes on from step {begin}")
    for step in range(begin, STEPS):
        optimizer.zero_grad()
        x = torch.randn(10, 6, dtype=torch.float64)
        pipe.step(x, loss_fn=toys.mean_loss)
        optimizer.step()
        if last is None:
            continue
        harm = (RANK, START, step)
        if harm == (1, 0, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        if harm == (1, 1, 3):
            os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        extra = {"step": step + 1, "random": torch.get_rng_state()}
        checkpoint.save(last, pipe, optimizer, extra)
    return pipe


if __name__ == "__main__":
    torch.set_num_threads(1)
    package, last = map(Path, sys.argv[1:])
    found, expected = trained(package, last).state_dict(), trained(package, None).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    say("has the same weights")
