"""A process's part of a package on disk; all ranks refuse what one can't load or has otherwise."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from fxpipe.errors import FxpipeError, InputError
from fxpipe.runtime import stream
from fxpipe.runtime.distributed.agreement import refuse_size, refuse_unloadable
from fxpipe.runtime.distributed.around import refuse_part
from fxpipe.runtime.distributed.device import device_of, refuse_backend, refuse_shared
from fxpipe.runtime.distributed.pipeline import DistributedPipeline
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.files import code_digests, read_files, read_plan, weights_of
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.stream import Devices


def load_rank(
    path: Path,
    devices: Devices | None,
    compile: bool,
    deferred_batch_norm: bool,
    outputs: Literal["last", "all"],
    dp: int,
    timeout_s: float,
    fully_shard: bool,
) -> DistributedPipeline:
    """What `load(path, distributed=True)` gives. Raises what it raises, alike on all ranks."""
    ranks = Ranks(dp, timeout_s)
    folder = Path(os.path.realpath(path))
    problem = None
    facts: dict[str, object] = {
        "torch": str(torch.__version__),
        "backend of torch.distributed": dist.get_backend_config(),
        "outputs": outputs,
        "fully_shard": fully_shard,
        "deferred_batch_norm": deferred_batch_norm,
        "weights": (folder / "weights").is_dir(),
        **code_digests(folder),
    }
    try:
        manifest = read_plan(folder)
        refuse_size(ranks.size, ranks.dp, len(manifest.devices))
        refuse_part(manifest, fully_shard)
        device = device_of(manifest, devices, ranks.rank)
        refuse_backend(dist.get_backend_config(), device)
        files = read_files(folder, manifest, [device] * ranks.size, ranks.rank)
        own = [stage for stage in files.stages if stage.spec.device == ranks.rank]
        if deferred_batch_norm:
            for stage in own:
                stage.defer_batch_norm(manifest.microbatches)
        if len(manifest.devices) > 1:
            _refuse_synchronized(own)
    except FxpipeError as error:
        problem = str(error)
    ranks.agree(facts, problem)
    ranks.agree({"kind of device": device.type}, None)
    refuse_shared(ranks.gather_world(stream.hardware(device)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    sharded = fully_shard and dp > 1
    pipe = DistributedPipeline(
        manifest, files.table, files.stages, device, files.buffers, ranks, outputs, sharded
    )
    if compile:
        for stage in own:
            stage.compile()
    weights = weights_of(folder, manifest)
    if weights is not None:
        refuse_unloadable(pipe._load_agreed(weights, True, ranks.gather_world))
    pipe.equalize()
    if sharded:
        pipe.shard()
    return pipe


def _refuse_synchronized(stages: Sequence[Stage]) -> None:
    """Raise InputError where batch norms would wait for processes that never come to them."""
    for stage in stages:
        for name, module in stage.module.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise InputError(
                    f"{name!r} in {stage.spec.file} is a SyncBatchNorm, which takes the mean over "
                    "all processes, those of other stages too: compile the model without "
                    "convert_sync_batchnorm, which normalizes each micro-batch of a replica by "
                    "itself"
                )
