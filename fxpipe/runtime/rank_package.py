"""A process's part of a package on disk; all ranks refuse what one can't load or has otherwise."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from fxpipe.errors import FxpipeError
from fxpipe.runtime import package, stream
from fxpipe.runtime.agreement import refuse_size
from fxpipe.runtime.around import refuse_part
from fxpipe.runtime.distributed import DistributedPipeline
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.rank_device import device_of, refuse_backend, refuse_shared
from fxpipe.runtime.ranks import Ranks
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
    folder = path.resolve()
    problem = None
    facts: dict[str, object] = {
        "torch": str(torch.__version__),
        "backend of torch.distributed": dist.get_backend_config(),
        "outputs": outputs,
        "fully_shard": fully_shard,
        "weights": (folder / "weights").is_dir(),
        **{name: _digest(folder / name) for name in sorted(_code(folder))},
    }
    broken: list[str] = []
    try:
        manifest = Manifest.from_json(package._text(folder, "plan.json"))
        refuse_size(ranks.size, ranks.dp, len(manifest.devices))
        refuse_part(manifest, fully_shard)
        device = device_of(manifest, devices, ranks.rank)
        refuse_backend(dist.get_backend_config(), device)
        table = package._schedule(folder, manifest, broken)
        stages = package._stages(folder, manifest, [device] * ranks.size, broken, ranks.rank)
        buffers = package._buffers(folder, manifest, broken)
        package._refuse(folder, [*package._port_rules(manifest), *broken])
        own = [stage for stage in stages if stage.spec.device == ranks.rank]
        if deferred_batch_norm:
            package._defer(manifest, own)
    except FxpipeError as error:
        problem = str(error)
    ranks.agree(facts, problem)
    ranks.agree({"kind of device": device.type}, None)
    refuse_shared(ranks.gather_world(stream.hardware(device)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    sharded = fully_shard and dp > 1
    pipe = DistributedPipeline(manifest, table, stages, device, buffers, ranks, outputs, sharded)
    if compile:
        for stage in own:
            stage.compile()
    if (folder / "weights").is_dir():
        pipe.load_weights(folder / "weights")
    pipe.equalize()
    if sharded:
        pipe.shard()
    return pipe


def _code(folder: Path) -> Iterator[str]:
    """The files that all ranks must have alike."""
    yield from (path.name for path in folder.glob("*.py"))
    yield from ("plan.json", "schedule.csv")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else "none"
