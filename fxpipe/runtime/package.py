"""A package on disk becomes a pipeline, after a check of all that must fit together."""

import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from fxpipe.errors import DeviceError, FxpipeError, InputError, PackageError
from fxpipe.runtime.batchnorm import defer
from fxpipe.runtime.components import Components
from fxpipe.runtime.imports import module_of, package_of
from fxpipe.runtime.manifest import Manifest, StageSpec
from fxpipe.runtime.pipeline import Pipeline
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.stream import Device, Devices, parse_devices, place
from fxpipe.schedule import Schedule
from fxpipe.schedule_check import check


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
        if without or capture is not None:
            raise InputError("without and capture are for pipelines of one process")
        # Not every build of torch has torch.distributed.
        from fxpipe.runtime.rank_package import load_rank

        return load_rank(
            Path(path), devices, compile, deferred_batch_norm, outputs, dp, timeout_s, fully_shard
        )
    if dp != 1 or fully_shard:
        raise InputError("dp and fully_shard are for distributed=True, under torchrun")
    folder = Path(path).resolve()
    manifest = Manifest.from_json(_text(folder, "plan.json"))
    lanes = _devices(manifest, devices)
    broken: list[str] = []
    table = _schedule(folder, manifest, broken)
    stages = _stages(folder, manifest, lanes, broken)
    buffers = _buffers(folder, manifest, broken)
    _refuse(folder, [*_port_rules(manifest), *broken])
    if deferred_batch_norm:
        _defer(manifest, stages)
    pipe = Pipeline(manifest, table, stages, lanes, buffers, Components.without(without), capture)
    if compile:
        for stage in stages:
            stage.compile()
    if (folder / "weights").is_dir():
        pipe.load_weights(folder / "weights")
    return pipe


def read(path: str | Path) -> Manifest:
    """The plan of the package in folder `path`, checked as `load` does but without memory.

    Raises PackageError, with every rule that its files break.
    """
    folder = Path(path).resolve()
    manifest = Manifest.from_json(_text(folder, "plan.json"))
    broken: list[str] = []
    _schedule(folder, manifest, broken)
    with torch.device("meta"):
        _stages(folder, manifest, [torch.device("meta")] * len(manifest.devices), broken)
    _refuse(folder, [*_port_rules(manifest), *broken])
    return manifest


def _defer(manifest: Manifest, stages: Sequence[Stage]) -> None:
    for stage in stages:
        try:
            defer(stage.module, stage.spec.mutated_buffers, manifest.microbatches)
        except ValueError as error:
            raise PackageError(
                f"{stage.spec.file}: {error}; load without deferred_batch_norm"
            ) from error


def _refuse(folder: Path, broken: Sequence[str]) -> None:
    if broken:
        raise PackageError(
            f"the files of {folder} do not fit each other:\n  "
            + "\n  ".join(broken)
            + "\nmake the same edit in plan.json and the stage file, or compile again"
        )


def _text(folder: Path, file: str) -> str:
    try:
        return (folder / file).read_text(encoding="utf-8")
    except OSError as error:
        raise PackageError(
            f"{folder} is no package of fxpipe: its {file} can't be read ({error.strerror}). Give "
            "the folder that fxpipe compile wrote"
        ) from error


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


def _schedule(folder: Path, manifest: Manifest, broken: list[str]) -> Schedule:
    try:
        table = Schedule.from_csv(_text(folder, "schedule.csv"))
        check(table, manifest.stage_to_device, manifest.microbatches, manifest.written)
    except FxpipeError as error:
        broken.append(f"schedule.csv: {error}")
        return Schedule(())
    return table


def _port_rules(manifest: Manifest) -> Iterator[str]:
    """What is wrong with devices, with ties, and with where stages get their values from."""
    made = {-1: {spec.value for spec in manifest.inputs}}
    for j, stage in enumerate(manifest.stages):
        where = f"plan.json: stage {j}"
        if not 0 <= stage.device < len(manifest.devices):
            yield f"{where} is on device {stage.device} of {len(manifest.devices)}"
        if stage.checkpoint not in ("never", "except_last", "always"):
            yield f"{where} has checkpoint {stage.checkpoint!r}: never, except_last or always"
        for port in stage.inputs:
            source = -1 if port.source is None else port.source
            if port.value not in made.get(source, ()):
                yield (
                    f"{where} takes {port.value!r} from {_who(port.source)}, which "
                    + ("makes no such value" if source in made else "does not run before it")
                )
        made[j] = {output.value for output in stage.outputs}
    for output in manifest.outputs:
        source = -1 if output.stage is None else output.stage
        if output.value not in made.get(source, ()):
            yield f"plan.json: output {output.value!r} is not made by {_who(output.stage)}"
    names = {state.name for state in manifest.state}
    for state in manifest.state:
        if state.alias_of is not None and state.alias_of not in names:
            yield f"plan.json: {state.name!r} is tied to {state.alias_of!r}, which is not in state"


def _who(stage: int | None) -> str:
    return "the caller" if stage is None else f"stage {stage}"


def _stages(
    folder: Path,
    manifest: Manifest,
    lanes: Sequence[Device],
    broken: list[str],
    rank: int | None = None,
) -> list[Stage]:
    """The stages; with `rank`, those of other ranks are there by their plan alone."""
    package = package_of(folder)
    importlib.invalidate_caches()
    stages = []
    frozen = frozenset(state.name for state in manifest.state if not state.spec.requires_grad)
    # Constructors draw initial weights; loading must not change what the caller draws next.
    with torch.random.fork_rng(devices=[]):
        for j, spec in enumerate(manifest.stages):
            if rank is not None and spec.device != rank:
                stages.append(Stage(j, spec, nn.Module(), 0, place(lanes[rank]), spec.file))
                continue
            module = _module(folder, package, spec, broken)
            if module is None or not 0 <= spec.device < len(lanes):
                continue
            broken += _state_rules(manifest, spec, module)
            device = place(lanes[spec.device])
            lane = spec.device if rank is None else 0
            path = str(folder / spec.file)
            own = frozen.intersection(spec.parameters)
            stages.append(Stage(j, spec, module.to(device), lane, device, path, frozen=own))
    return stages


def _module(folder: Path, package: str, spec: StageSpec, broken: list[str]) -> nn.Module | None:
    """The stage's module; what is wrong with its file goes to `broken`."""
    if not (folder / spec.file).is_file() or Path(spec.file).name != spec.file:
        broken.append(f"{spec.file} is missing")
        return None
    try:
        found = getattr(module_of(package, spec.file), spec.class_name, None)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            broken.append(f"{spec.file} has no nn.Module class {spec.class_name}")
            return None
        parameters = list(inspect.signature(found.forward).parameters)[1:]
        module = found()
    except Exception as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        broken.append(f"{spec.file}{line} fails: {type(error).__name__}: {error}")
        return None
    expected = [port.parameter for port in spec.inputs]
    if parameters != expected:
        broken.append(
            f"{spec.file}: forward takes ({', '.join(parameters)}), plan.json says "
            f"({', '.join(expected)})"
        )
    return module


def _state_rules(manifest: Manifest, spec: StageSpec, module: nn.Module) -> Iterator[str]:
    """Where a stage's parameters and buffers differ from the plan's."""
    known = {state.name: state for state in manifest.state}
    held: list[tuple[str, Mapping[str, Tensor], Sequence[str]]] = [
        ("parameter", dict(module.named_parameters(remove_duplicate=False)), spec.parameters),
        ("buffer", dict(module.named_buffers(remove_duplicate=False)), spec.buffers),
    ]
    for kind, tensors, names in held:
        for name in sorted(set(names) - set(tensors)):
            yield f"{spec.file} holds no {kind} {name!r}, plan.json says it does"
        for name in sorted(set(tensors) - set(names)):
            yield f"{spec.file} holds {kind} {name!r}, plan.json does not list it for the stage"
        for name in sorted(set(tensors) & set(names)):
            if name not in known:
                yield f"plan.json: {kind} {name!r} of {spec.file} is missing in state"
                continue
            shape = known[name].spec.sizes({})
            if tuple(tensors[name].shape) != shape:
                found = tuple(tensors[name].shape)
                yield f"{spec.file}: {kind} {name!r} has shape {found}, plan.json says {shape}"
    for name in sorted(set(spec.mutated_buffers) - set(spec.buffers)):
        yield f"plan.json: {spec.file} writes buffer {name!r}, which it does not hold"


def _buffers(folder: Path, manifest: Manifest, broken: list[str]) -> dict[str, Tensor]:
    """The saved values in buffers.pt, if there are some."""
    if not (folder / "buffers.pt").exists():
        return {}
    try:
        values: dict[str, Tensor] = torch.load(
            folder / "buffers.pt", map_location="cpu", weights_only=True
        )
    except Exception as error:
        broken.append(f"buffers.pt can't be read: {error}")
        return {}
    shapes = {state.name: state.spec.sizes({}) for state in manifest.state}
    for name, value in values.items():
        if name not in shapes:
            broken.append(f"buffers.pt has {name!r}, which plan.json does not list")
        elif tuple(value.shape) != shapes[name]:
            broken.append(
                f"buffers.pt: {name!r} has shape {tuple(value.shape)}, plan.json says "
                f"{shapes[name]}"
            )
    return values
