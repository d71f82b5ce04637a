"""How processes find each other, also those that torchrun has started again.

torchrun keeps its store through restarts (https://github.com/pytorch/pytorch/issues/135712), with
the addresses that the processes of before have left in it: new ones read them, and wait forever. No
count of starts is the same on all hosts. So the first rank makes up a name for this start, gives it
to each that asks, and all use the part of the store below that name.
"""

import atexit
import os
import secrets
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fxpipe.errors import InputError, StageError

_LOOK_S = 0.02


def meet(timeout_s: float) -> None:
    """Set `torch.distributed` up as torchrun's environment says, if nobody has.

    Raises InputError if there is no such environment or its port is taken, StageError if others
    don't come in time.
    """
    if not dist.is_available():
        raise InputError("this torch was built without torch.distributed")
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        raise InputError(
            "distributed=True is for a script that torchrun starts, one process per "
            "device: torchrun --nproc-per-node 2 script.py"
        )
    try:
        _join(timedelta(seconds=timeout_s))
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise InputError(
                f"rank {os.environ['RANK']}: port {os.environ['MASTER_PORT']} is taken, as by "
                "another program: set MASTER_PORT to another on all ranks"
            ) from error
        raise StageError(
            f"rank {os.environ['RANK']}: the {os.environ.get('WORLD_SIZE')} processes did not meet "
            f"within {timeout_s:g} s: {str(error).partition(chr(10))[0]}"
        ) from error
    # Else torch's own threads now and then abort the process as it ends.
    atexit.register(_leave)


def backend() -> str:
    """What carries tensors on each kind of device that is here."""
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if gpus else "gloo"


def apart(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """The part of the store of those who call this together, whatever others have left in it."""
    own = secrets.token_hex(8)
    if rank == 0:
        _receive(store, own, size, timeout)
        return PrefixStore(own, store)
    # Only a process that runs now can answer to what was just made up.
    store.set(f"asks/{rank}", own)
    store.wait([f"answer/{own}"], timeout)
    name = store.get(f"answer/{own}").decode()
    store.set(f"{name}/knows/{rank}", "")
    return PrefixStore(name, store)


def _join(timeout: timedelta) -> None:
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store = apart(PrefixStore("fxpipe", store), rank, size, timeout)
    dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=timeout)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _receive(store: Store, name: str, size: int, timeout: timedelta) -> None:
    """Answer `name` to each other rank that asks, until all know it."""
    missing = list(range(1, size))
    until = time.monotonic() + timeout.total_seconds()
    while missing := [rank for rank in missing if not store.check([f"{name}/knows/{rank}"])]:
        if time.monotonic() > until:
            late = ", ".join(map(str, missing))
            told = f"ranks {late} have" if len(missing) > 1 else f"rank {late} has"
            raise dist.DistStoreError(f"{told} not come")
        for rank in missing:
            if store.check([f"asks/{rank}"]):
                store.set(f"answer/{store.get(f'asks/{rank}').decode()}", name)
        time.sleep(_LOOK_S)
