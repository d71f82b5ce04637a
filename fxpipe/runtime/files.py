"""What is read from a package's folder, with every rule that its files break."""

import hashlib
import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fxpipe.errors import FxpipeError, PackageError
from fxpipe.runtime.imports import module_of, package_of
from fxpipe.runtime.lines import line_of
from fxpipe.runtime.manifest import Manifest, StageSpec
from fxpipe.runtime.saved_buffers import saved_buffers
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.stream import Device, place
from fxpipe.schedule import Schedule
from fxpipe.schedule_check import check

_DIGITS = 12  # of a hash, to tell files from each other


@dataclass(frozen=True, slots=True)
class Files:
    """What the files of a package hold besides its plan; `buffers` are those with saved values."""

    table: Schedule
    stages: Sequence[Stage]
    buffers: Mapping[str, Tensor]


def read_plan(folder: Path) -> Manifest:
    """The plan of the package in `folder`. Raises PackageError."""
    return Manifest.from_json(_text(folder, "plan.json"))


def read_files(
    folder: Path, manifest: Manifest, lanes: Sequence[Device], rank: int | None = None
) -> Files:
    """What goes with the plan `manifest`, on its devices `lanes`.

    With `rank`, stages of other ranks are there by their plan alone. Raises PackageError, with
    every rule that the files break.
    """
    broken: list[str] = []
    table = _schedule(folder, manifest, broken)
    stages = _stages(folder, manifest, lanes, broken, rank)
    # What is as it was written has all that it needs; of edited code nobody knows what it makes.
    changed = _is_edited(folder, manifest, "buffers.pt")
    edited = _edited(folder, manifest)
    whole = [stage for stage in stages if changed and stage.spec.file not in edited]
    buffers = saved_buffers(folder, manifest, whole, broken)
    broken[:0] = _port_rules(manifest)
    if broken:
        raise PackageError(
            f"the files of {folder} do not fit each other:\n  "
            + "\n  ".join(broken)
            + f"\n{', '.join(_ways_out(broken))}, or compile again"
        )
    return Files(table, stages, buffers)


def _ways_out(broken: Sequence[str]) -> Iterator[str]:
    of_table = [rule for rule in broken if rule.startswith("schedule.csv: ")]
    others = [rule for rule in broken if rule not in of_table]
    missing = [rule for rule in others if rule.endswith(" is missing")]
    if of_table:
        yield "mend schedule.csv"
    if any(", its stage on " in rule for rule in of_table):
        yield "move stages by compiling with such a table into another folder (--schedule FILE.csv)"
    if missing:
        yield "put back what is missing"
    if len(others) > len(missing):
        yield "make the same edit in plan.json and the stage file"


def weights_of(folder: Path, manifest: Manifest) -> Path | None:
    """Where the model's values are, if they came with the package; warns if they are gone."""
    if (folder / "weights").is_dir():
        return folder / "weights"
    if any(name.startswith("weights/") for name in manifest.files):
        warnings.warn(
            f"{folder} was compiled with the model's weights, and its folder weights is not here: "
            "the pipeline begins with new ones. Put the folder back, or load others with "
            "load_weights",
            stacklevel=3,
        )
    return None


def code_digests(folder: Path) -> dict[str, str]:
    """By name, what tells whether two processes have a file alike that they must."""
    names = sorted(["plan.json", "schedule.csv", *(path.name for path in folder.glob("*.py"))])
    return {name: _digest(folder / name) for name in names}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS] if path.is_file() else "none"


def _text(folder: Path, file: str) -> str:
    try:
        return (folder / file).read_text(encoding="utf-8")
    except OSError as error:
        raise PackageError(
            f"{folder} is no package of fxpipe: its {file} can't be read ({error.strerror}). Give "
            "the folder that fxpipe compile wrote"
        ) from error
    except UnicodeDecodeError as error:
        raise PackageError(
            f"{folder / file} is no text in UTF-8 ({error.reason} at byte {error.start}): save it "
            "as UTF-8"
        ) from error


def _schedule(folder: Path, manifest: Manifest, broken: list[str]) -> Schedule:
    if not (folder / "schedule.csv").exists():
        broken.append("schedule.csv is missing")
        return Schedule(())
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
    rank: int | None,
) -> list[Stage]:
    package = package_of(folder)
    importlib.invalidate_caches()
    stages = []
    frozen = frozenset(state.name for state in manifest.state if not state.spec.requires_grad)
    # Constructors draw initial weights; loading must not change what the caller draws next.
    with torch.random.fork_rng(devices=[]):
        for j, spec in enumerate(_as_edited(folder, manifest)):
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


def _as_edited(folder: Path, manifest: Manifest) -> Iterator[StageSpec]:
    """What the plan says of the stages, but that a stage whose code was edited detaches nothing.

    What it reads and makes may have gradients now that had none.
    """
    files = _edited(folder, manifest)
    edited = [spec for spec in manifest.stages if spec.file in files]
    read = {(port.source, port.value) for spec in edited for port in spec.inputs}
    for j, spec in enumerate(manifest.stages):
        outputs = []
        for output in spec.outputs:
            made, dtype = output.spec, output.spec.torch_dtype
            if spec in edited and (dtype.is_floating_point or dtype.is_complex):
                made = replace(made, requires_grad=True)
            detached = output.detached and spec not in edited and (j, output.value) not in read
            outputs.append(replace(output, spec=made, detached=detached))
        yield replace(spec, outputs=tuple(outputs))


def _edited(folder: Path, manifest: Manifest) -> set[str]:
    """The files of stages whose code was edited, there or in what they share."""
    shared = any(_is_edited(folder, manifest, name) for name in ("blocks.py", "functions.py"))
    files = {spec.file for spec in manifest.stages}
    return {name for name in files if shared or _is_edited(folder, manifest, name)}


def _is_edited(folder: Path, manifest: Manifest, name: str) -> bool:
    written = manifest.files.get(name)
    return written is not None and _digest(folder / name) != written[:_DIGITS]


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
    except (Exception, SystemExit) as error:
        line = line_of(error, str(folder / spec.file))
        if not line and isinstance(error, SyntaxError) and error.lineno:
            line = f", line {error.lineno}"
        kind = type(error).__name__
        said = f"{kind}: {error}" if str(error) else kind
        broken.append(f"{spec.file}{line} fails: {said}")
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
            if known[name].spec.requires_grad > tensors[name].requires_grad:
                yield f"{spec.file}: {kind} {name!r} is not trained, plan.json says it is"
    for name in sorted(set(spec.mutated_buffers) - set(spec.buffers)):
        yield f"plan.json: {spec.file} writes buffer {name!r}, which it does not hold"
