"""What `fxpipe compile` and `inspect` print of a package: its plan, as tables and as JSON."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from fxpipe.edits import Edits
from fxpipe.runtime.manifest import EstimateSpec, Manifest, StageSpec
from fxpipe.show.table import edits_lines, new_table, spaced
from fxpipe.show.texts import bytes_text, checked_text, devices_text, ms_text, plural

_HELD_UP = 1.01


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
                "device_number": stage.device,
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
    parts: list[RenderableType] = [_heading(manifest), _stages(facts["stages"])]
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
    return spaced([*parts, _step(manifest), *edits_lines(edits)])


def _heading(manifest: Manifest) -> str:
    at_most = "at most " if manifest.batch % manifest.microbatches else ""
    return (
        f"[bold]{escape(manifest.model)}[/bold]: {plural(len(manifest.stages), 'stage')} on "
        f"{devices_text(manifest.devices)}; batch {manifest.batch} in "
        f"{plural(manifest.microbatches, 'micro-batch', 'es')} of {at_most}{_rows(manifest)}; "
        f"schedule {manifest.schedule}"
    )


def _stages(facts: Sequence[dict[str, Any]]) -> Table:
    table = new_table(
        "stage", "device", "ops", "parameters", "", "forward", "backward", "peak memory"
    )
    modes = {fact["checkpoint"] for fact in facts}
    if modes != {"never"}:
        table.add_column("checkpoint")
    for fact in facts:
        row = [
            str(fact["stage"]),
            f"{fact['device_number']}: {fact['device']}",
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
    table = new_table("value", "from", "to", "shape", "bytes", "", left=("value", "shape"))
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
    gap = "" if manifest.gap is None else f", gap {manifest.gap:z.1%}"
    loss = f"loss {ms_text(estimate.loss_ms)}" if estimate.loss_ms else "no loss"
    return (
        f"[bold]predicted step {ms_text(estimate.step_ms)}, bubble {estimate.bubble:z.0%}[/bold]; "
        f"solver {manifest.solver}{gap}\n"
        f"{_waiting(estimate)}"
        f"times {escape(manifest.profile)}, {loss}; "
        f"graph {escape(checked_text(manifest.checked))}\n"
        f"memory planned for {escape(manifest.optimizer.text)}\n"
        "[dim]forward, backward and bytes are of one micro-batch; peak memory is the device's "
        "over a step[/dim]"
    )


def _waiting(estimate: EstimateSpec) -> str:
    """That a step waits for the host, where it is longer for it by a hundredth."""
    captured_ms = estimate.captured_ms
    if captured_ms is None or estimate.step_ms < _HELD_UP * captured_ms:
        return ""
    held_ms = ms_text(captured_ms)
    return f"it waits for the host: as a CUDA graph, on one GPU, it would take {held_ms}\n"


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
