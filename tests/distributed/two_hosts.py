"""Ranks on two hosts: `python two_hosts.py PACKAGE CABLE NAMESPACE NAMESPACE`.

A good cable is cut in the second step; over others, ranks train as one process would. Prints as
JSON of each rank its exit code and what it has written.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import hosts
import jobs
import torch
import toys
from forked import Rank, ends, port, start

from fxpipe.runtime import load
from fxpipe.runtime.distributed.pipeline import DistributedPipeline


def cut_off(folder: Path) -> None:
    """Rank 1's host loses its cable before its second step's third forward."""
    pipe = load(folder, distributed=True, timeout_s=8)
    assert isinstance(pipe, DistributedPipeline)
    pipe.double()
    seen = []

    def hook(*_: object) -> None:
        seen.append(None)
        if len(seen) == pipe.manifest.microbatches + 3:
            time.sleep(2)  # until both have told where they are
            hosts.cut()

    if pipe.is_last:
        pipe._stages[-1].module.register_forward_pre_hook(hook)
    for _ in range(2):
        pipe.step(*toys.SKIPS.inputs(), loss_fn=toys.mean_loss)


def run(folder: Path, cable: str, namespace: str) -> None:
    hosts.enter(namespace)
    torch.set_num_threads(1)
    if cable == "good":
        cut_off(folder)
    else:
        print(jobs.training(folder, "skips", 4))


if __name__ == "__main__":
    folder, cable, *namespaces = sys.argv[1:]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": hosts.INTERFACE}
    world |= {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": port()}
    ranks = []
    for k, namespace in enumerate(namespaces):
        run_it = partial(run, Path(folder), cable, namespace)
        ranks.append(Rank(f"{cable} {k}", {**world, "RANK": str(k)}, run_it))
    started = start(Path(folder), ranks)
    if started is not None:
        print(json.dumps(ends(Path(folder), started)))
