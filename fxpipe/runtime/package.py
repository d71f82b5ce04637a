"""A package on disk becomes a pipeline, after a check of all that must fit together."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch

from fxpipe.errors import DeviceError, InputError
from fxpipe.runtime.components import Components
from fxpipe.runtime.device_names import parse_devices
from fxpipe.runtime.files import read_files, read_plan, weights_of
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.pipeline import Pipeline
from fxpipe.runtime.stream import Device, Devices


def load(
    path: str | Path,
    devices: Devices | None = None,
    *,
    compile: bool = False,
    deferred_batch_norm: bool = False,
    without: Collection[str] = (),
    capture: str | None = None,
    distributed: bool = False,
    outputs: Literal["last", "all"] = "last",
    dp: int = 1,
    timeout_s: float = 600.0,
    fully_shard: bool = False,
) -> Pipeline:
    """The pipeline of the package in folder `path`, with its weights if it has a folder `weights`.

    `devices` are as many as it was compiled for, as in `"cuda:0,cuda:1"`, `"cuda:0/2"` (one GPU
    cut in two), `"cpu*2"`, or `2`, which means CUDA devices if there are enough; without them,
    those it was compiled for, or their number if they are not here. With `compile`, stages go
    through torch.compile when they first run, save those that draw random numbers. With
    `deferred_batch_norm`, batch norms update their running statistics once for all micro-batches,
    as the plain model does for a batch. `without` leaves out, for comparison, some of
    "dependency", "streams", "portals" and "checkpoint" (see `Components`). With `capture` "graph",
    each whole `step` is captured as a CUDA graph, once for each shape; one that can't be runs as
    ever, after a warning.

    With `distributed`, in a script that torchrun started with a process for each device, the
    pipeline has this process's stages alone, and runs with the others' (see
    `DistributedPipeline`); `outputs` says where what it gives comes. With `dp` replicas there is a
    process for each device of each: they train one model, each on a batch of its own. With
    `fully_shard` each holds a share of the parameters, their gradients and optimizer states, by
    torch's function of that name. A rank that waits for another for `timeout_s` seconds says what
    for, and ends. Raises InputError, PackageError, with every rule that its files break,
    WeightsError, DeviceError, and StageError if ranks are lost.
    """
    if distributed:
        for what, given in (("without", without), ("capture", capture)):
            if given:
                raise InputError(f"{what} is for pipelines of one process: leave it out")
        # Not every build of torch has torch.distributed.
        from fxpipe.runtime.distributed.package import load_rank

        return load_rank(
            Path(path), devices, compile, deferred_batch_norm, outputs, dp, timeout_s, fully_shard
        )
    if outputs != "last" or dp != 1 or timeout_s != 600.0 or fully_shard:
        raise InputError(
            "outputs, dp, timeout_s and fully_shard are for distributed=True, under torchrun"
        )
    folder = Path(os.path.realpath(path))
    manifest = read_plan(folder)
    lanes = _devices(manifest, devices)
    files = read_files(folder, manifest, lanes)
    if deferred_batch_norm:
        for stage in files.stages:
            stage.defer_batch_norm(manifest.microbatches)
    left = Components.without(without)
    pipe = Pipeline(manifest, files.table, files.stages, lanes, files.buffers, left, capture)
    if compile:
        for stage in files.stages:
            stage.compile()
    weights = weights_of(folder, manifest)
    if weights is not None:
        pipe.load_weights(weights)
    return pipe


def read(path: str | Path) -> Manifest:
    """The plan of the package in folder `path`, checked as `load` does but without memory.

    Raises PackageError, with every rule that its files break.
    """
    folder = Path(os.path.realpath(path))
    manifest = read_plan(folder)
    with torch.device("meta"):
        read_files(folder, manifest, [torch.device("meta")] * len(manifest.devices))
    return manifest


def _devices(manifest: Manifest, devices: Devices | None) -> tuple[Device, ...]:
    if devices is None:
        try:
            return parse_devices(manifest.devices)
        except DeviceError:
            return parse_devices(len(manifest.devices))
    lanes = parse_devices(devices)
    if len(lanes) != len(manifest.devices):
        raise DeviceError(
            f"the package was compiled for {len(manifest.devices)} devices, {len(lanes)} were "
            f"given: give {len(manifest.devices)}, or compile with --devices {len(lanes)}"
        )
    return lanes
