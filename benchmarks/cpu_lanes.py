"""`pipe.step` on two CPU lanes against torch.distributed.pipelining's two processes.

    python benchmarks/cpu_lanes.py             print the table
    python benchmarks/cpu_lanes.py --write     and keep it in benchmarks/CPU_LANES.md
    python benchmarks/cpu_lanes.py --compile   also with load(..., compile=True)

The same transformer blocks, weights and batch; a lane or a process has one thread. Ours runs 1F1B
in one process, and beside it interleaved, ZB-V and what the search plans; theirs every schedule it
has for two processes, of which the fastest counts. 1F1B can't be shorter than `limit`: plain, on
two lanes, and its bubble. All run in turns, a step each in random order, so that what else the
machine does, and what ran before, falls on all alike. First, losses and gradients are compared with
the plain model's.
"""

import argparse
import random
import tempfile
from pathlib import Path

import torch
from common import Compiling, machine
from torch_pipelining import SCHEDULES, Peer
from transformer import (
    WORKLOADS,
    Workload,
    batch,
    blocks,
    difference,
    loss_fn,
    milliseconds,
    plain_step,
    same,
    tables,
)

import fxpipe

HERE = Path(__file__).parent


# Milliseconds by the peer's best: ours, eager and compiled.
GOALS = dict(zip(WORKLOADS, [(0.88,), (0.90, 0.75), (0.95,)], strict=True))


def measure(work: Workload, peer: Peer, compiled: bool, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step, by who makes it."""
    model = blocks(work.hidden, work.layers)
    x, target = batch(work.hidden, work.rows, work.sequence)

    def plain() -> float:
        return plain_step(model, x, target, work.m)

    with tempfile.TemporaryDirectory() as folder:
        compile = Compiling(model, x, target, loss_fn, work.m, Path(folder))
        out = compile("1f1b")
        ours = {"fxpipe": fxpipe.load(out)}
        if compiled:
            ours["fxpipe, compiled"] = fxpipe.load(out, compile=True)
        for schedule in ("interleaved", "zb-v", "auto"):
            ours[f"fxpipe, {schedule}"] = fxpipe.load(compile(schedule))
        peer.prepare(*work)

        expected = plain()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        torch.save(gradients, f"{folder}/gradients")
        for name, pipe in ours.items():
            loss = pipe.step(x, target=target, loss_fn=loss_fn).item()
            named = dict(pipe.named_parameters())
            away = difference({name: named[name].grad for name in gradients}, gradients)
            same(name, max(away, abs(loss - expected) / abs(expected)))
        for name in SCHEDULES:
            loss = peer.step(name)[1]
            away = peer.difference(Path(folder) / "gradients")
            same(name, max(away, abs(loss - expected) / abs(expected)))

    times: dict[str, list[float]] = {name: [] for name in ("plain", *ours, *SCHEDULES)}
    for _ in range(rounds):
        model.zero_grad()
        times["plain"].append(milliseconds(plain))
        for name in random.sample([*ours, *SCHEDULES], len(ours) + len(SCHEDULES)):
            if pipe := ours.get(name):
                pipe.zero_grad()
                step = milliseconds(lambda p=pipe: p.step(x, target=target, loss_fn=loss_fn))
            else:
                step = peer.step(name)[0]
            times[name].append(step)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="also ours through torch.compile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workloads", type=int, nargs="*", default=range(len(WORKLOADS)))
    parser.add_argument("--write", action="store_true", help="keep it in CPU_LANES.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    peer = Peer()
    chosen = [WORKLOADS[k] for k in options.workloads]
    measured = {work: measure(work, peer, options.compile, options.rounds) for work in chosen}
    peer.close()
    goals = {work: all_[: 1 + options.compile] for work, all_ in GOALS.items()}
    text = (
        f"# Two CPU lanes against two processes\n\n{machine()}.\n"
        "Milliseconds of a training step in turns, each in random order; plain is one "
        "thread, micro-batch by\nmicro-batch; torch.distributed.pipelining has two gloo processes "
        "of one thread each, fxpipe one process of\ntwo lanes, 1F1B if not said otherwise; limit "
        "is plain on two lanes with the bubble of 1F1B.\n"
        f"Made by `python benchmarks/cpu_lanes.py{' --compile' * options.compile} --write`.\n\n"
        f"{tables(measured, SCHEDULES, goals)}\n"
    )
    print(text)
    if options.write:
        (HERE / "CPU_LANES.md").write_text(text)


if __name__ == "__main__":
    main()
