"""What the command prints: a package's plan and a verification, as tables and as JSON."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from fxpipe.edits import Edits
from fxpipe.runtime.manifest import Manifest, PartSpec, StageSpec
from fxpipe.texts import bytes_text, devices_text, ms_text, plural

if TYPE_CHECKING:
    from fxpipe.package import Package
    from fxpipe.verify import Verification


def package_json(manifest: Manifest, edits: Edits) -> dict[str, Any]:
    """The facts of `package_table`. Times and bytes of a stage are of one micro-batch."""
    return {
        "model": manifest.model,
        "batch": manifest.batch,
        "microbatches": manifest.microbatches,
        "schedule": manifest.schedule,
        "devices": list(manifest.devices),
        "solver": manifest.solver,
        "gap": manifest.gap,
        "checked": manifest.checked,
        "profile": manifest.profile,
        "optimizer": {"text": manifest.optimizer.text, "factor": manifest.optimizer.factor},
        "step_ms": manifest.estimate.step_ms,
        "bubble": manifest.estimate.bubble,
        "loss_ms": manifest.estimate.loss_ms,
        "stages": [
            {
                "stage": j,
                "file": stage.file,
                "device": manifest.devices[stage.device],
                "checkpoint": stage.checkpoint,
                "segments": [str(segment) for segment in stage.segments],
                "ops": stage.ops,
                "parameters": _count(manifest, stage),
                "parameter_bytes": stage.parameter_bytes,
                "forward_ms": stage.forward_ms,
                "backward_ms": stage.backward_ms,
                "saved_bytes": stage.saved_bytes,
                "peak_bytes": manifest.estimate.peak_bytes[stage.device],
            }
            for j, stage in enumerate(manifest.stages)
        ],
        "values": [
            {
                "value": port.value,
                "from": port.source,
                "to": j,
                "portal": port.portal,
                "dtype": port.spec.dtype,
                "shape": list(port.spec.shape),
                "bytes": port.spec.bytes(_sizes(manifest)),
            }
            for j, stage in enumerate(manifest.stages)
            for port in stage.inputs
            if port.source is not None
        ],
        "candidates": [asdict(candidate) for candidate in manifest.candidates],
        "shared_parameters": {name: list(js) for name, js in _shared(manifest).items()},
        "files": asdict(edits),
    }


def package_table(manifest: Manifest, edits: Edits) -> RenderableType:
    """Stages, the values between them, the predicted step, and files that were edited."""
    facts = package_json(manifest, edits)
    parts: list[RenderableType] = [_heading(manifest), _stages(manifest, facts["stages"])]
    if any(fact["segments"] for fact in facts["stages"]):
        parts.append("\n".join(_recomputed(facts["stages"])))
    if facts["values"]:
        parts.append(_values(manifest))
    if facts["shared_parameters"]:
        parts.append(
            "\n".join(
                f"{escape(name)} is shared by stages {', '.join(map(str, stages))}: its gradients "
                "are added up"
                for name, stages in facts["shared_parameters"].items()
            )
        )
    parts.append(_step(manifest))
    parts += _files(edits)
    spaced = [part for section in parts for part in ("", section)]
    return Group(*spaced[1:])


def _files(edits: Edits) -> list[str]:
    """The line that tells which files are no longer as they were written, if there are any."""
    changed = [f"{how} {', '.join(names)}" for how, names in asdict(edits).items() if names]
    return [escape(f"files: {'; '.join(changed)}")] if changed else []


def _heading(manifest: Manifest) -> str:
    at_most = "at most " if manifest.batch % manifest.microbatches else ""
    return (
        f"[bold]{escape(manifest.model)}[/bold]: {plural(len(manifest.stages), 'stage')} on "
        f"{devices_text(manifest.devices)}; batch {manifest.batch} in "
        f"{plural(manifest.microbatches, 'micro-batch', 'es')} of {at_most}{_rows(manifest)}; "
        f"schedule {manifest.schedule}"
    )


def _stages(manifest: Manifest, facts: Sequence[dict[str, Any]]) -> Table:
    table = new_table(
        "stage", "device", "ops", "parameters", "", "forward", "backward", "peak memory"
    )
    modes = {fact["checkpoint"] for fact in facts}
    if modes != {"never"}:
        table.add_column("checkpoint")
    for fact in facts:
        row = [
            str(fact["stage"]),
            fact["device"],
            str(fact["ops"]),
            f"{fact['parameters']:,}",
            bytes_text(fact["parameter_bytes"]),
            ms_text(fact["forward_ms"]),
            ms_text(fact["backward_ms"]),
            bytes_text(fact["peak_bytes"]),
        ]
        table.add_row(*row, *([fact["checkpoint"]] if modes != {"never"} else []))
    return table


def _recomputed(facts: Sequence[dict[str, Any]]) -> Iterator[str]:
    for fact in facts:
        if fact["segments"]:
            yield escape(f"stage {fact['stage']} recomputes {', '.join(fact['segments'])}")


def _values(manifest: Manifest) -> Table:
    table = new_table("value", "from", "to", "shape", "bytes", "")
    table.columns[0].justify = table.columns[3].justify = "left"
    table.columns[0].overflow = "fold"
    for j, stage in enumerate(manifest.stages):
        for port in stage.inputs:
            if port.source is not None:
                table.add_row(
                    escape(port.value),
                    str(port.source),
                    str(j),
                    escape(str(port.spec)),
                    bytes_text(port.spec.bytes(_sizes(manifest))),
                    "portal" if port.portal else "",
                )
    return table


def _step(manifest: Manifest) -> str:
    estimate = manifest.estimate
    gap = "" if manifest.gap is None else f", gap {manifest.gap:.1%}"
    loss = f"loss {ms_text(estimate.loss_ms)}" if estimate.loss_ms else "no loss"
    return (
        f"[bold]predicted step {ms_text(estimate.step_ms)}, bubble {estimate.bubble:.0%}[/bold]; "
        f"solver {manifest.solver}{gap}\n"
        f"times {escape(manifest.profile)}, {loss}; "
        f"graph {escape(_checked(manifest.checked))}\n"
        f"memory planned for {escape(manifest.optimizer.text)}\n"
        "[dim]forward, backward and bytes are of one micro-batch; peak memory is the device's "
        "over a step[/dim]"
    )


def _checked(checked: str) -> str:
    if checked == "nothing":
        return "not compared with the model, which was built without memory"
    return f"equal to the model in {checked}"


def passes_text(package: "Package") -> str:
    """One line for each pass: what it made."""
    capture, profile, chain, plan = package.capture, package.profile, package.chain, package.plan
    ports = [port for stage in package.manifest.stages for port in stage.inputs]
    portals = sum(port.portal for port in ports)
    cuts = ", ".join(map(str, plan.cuts)) or "none"
    bound = "" if plan.bound_ms is None else f", bound {ms_text(plan.bound_ms)}"
    lines = {
        "capture": f"{len(capture.ops)} ops, {len(capture.state)} tensors of state, "
        f"{_checked(capture.checked)}",
        "profile": f"{len(profile.costs)} ops {profile.origin} on {profile.device}, "
        f"{profile.batch} rows",
        "linearize": f"{len(chain.blocks)} blocks, {sum(chain.cuttable)} places to cut, "
        f"{len(chain.values)} values between blocks",
        "partition": f"cuts after blocks {cuts} by {plan.solver}: step "
        f"{ms_text(plan.estimate.step_ms)}{bound}",
        "portals": f"{sum(port.source is not None for port in ports)} values cross, "
        f"{portals} by portal",
        "emit": f"{len(package.files)} files, "
        f"{sum(text.count(chr(10)) for text in package.files.values())} lines",
    }
    return "\n".join(f"{name:<12}{line}" for name, line in lines.items())


def verification_json(result: "Verification", edits: Edits) -> dict[str, Any]:
    """The verification with its verdict, and files that were edited."""
    return {"equal": result.equal, **_finite(asdict(result)), "files": asdict(edits)}


def verification_table(result: "Verification", edits: Edits) -> RenderableType:
    """The largest differences of each group, files that were edited, then the verdict."""
    table = new_table("compared", "tensors", "absolute", "relative", "largest in")
    table.columns[0].justify = table.columns[-1].justify = "left"
    table.columns[-1].overflow = "fold"
    for d in result.differences:
        worst = f"missing: {', '.join(d.missing)}" if d.missing else d.worst or ""
        table.add_row(
            d.group, str(d.tensors), f"{d.absolute:.1e}", f"{d.relative:.1e}", escape(worst)
        )
    verdict = (
        f"[green]equal[/green]: all within {result.tolerance:g} relative"
        if result.equal
        else f"[red]differs[/red]: over {result.tolerance:g} relative"
    )
    m = plural(result.microbatches, "micro-batch", "es")
    notes = [*(escape(note) for note in result.notes), *_files(edits)]
    return Group(table, *notes, f"{verdict} ({result.dtype}, batch {result.batch} in {m})")


def choice_text(asked: str, devices: Sequence[str], n_cuda: int) -> str:
    """Which devices a `--devices` text came to, and why."""
    text = f"devices: {devices_text(devices)}"
    if set(devices) == {"cpu"} and asked.strip().isdigit():
        return f"{text}, since this machine has {plural(n_cuda, 'CUDA device')}"
    return text


def part_text(part: PartSpec) -> str:
    """Which part of a model the package is of, and why it is not the whole."""
    first, last = part.modules[0], part.modules[-1]
    taken = first if first == last else f"{first} to {last}"
    return (
        f"took {taken}, {part.share:.0%} of the parameters: {part.broken_by}\n"
        "the rest runs as it is: model = fxpipe.splice(model, fxpipe.load(...))"
    )


def new_table(*headings: str) -> Table:
    """An empty table as all of the command's are."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _rows(manifest: Manifest) -> int:
    """Rows of the largest micro-batch."""
    return math.ceil(manifest.batch / manifest.microbatches)


def _sizes(manifest: Manifest) -> dict[str, int]:
    """Those of the largest micro-batch."""
    return {**manifest.sizes, "batch": _rows(manifest)}


def _count(manifest: Manifest, stage: StageSpec) -> int:
    """Numbers in the stage's parameters, a tied one counted once."""
    specs = {state.name: state.spec for state in manifest.state}
    return sum(math.prod(specs[name].sizes({})) for name in _first_names(manifest, stage))


def _shared(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Stages of each parameter that more than one holds."""
    stages: dict[str, list[int]] = {}
    for j, stage in enumerate(manifest.stages):
        for name in _first_names(manifest, stage):
            stages.setdefault(name, []).append(j)
    return {name: tuple(js) for name, js in stages.items() if len(js) > 1}


def _first_names(manifest: Manifest, stage: StageSpec) -> Sequence[str]:
    alias_of = {state.name: state.alias_of or state.name for state in manifest.state}
    return list(dict.fromkeys(alias_of.get(name, name) for name in stage.parameters))


def _finite(value: Any) -> Any:
    """Infinity as text: JSON has no number for it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
