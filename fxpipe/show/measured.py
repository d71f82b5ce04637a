"""A step as it ran, by the files that `pipe.trace` wrote: one, or one of each rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fxpipe.edits import Edits
from fxpipe.errors import InputError
from fxpipe.runtime import trace
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.trace import Event, Part
from fxpipe.show.view import View, in_time, predicted


@dataclass(frozen=True, slots=True)
class _Traced:
    """What is in a file: a whole step, or the `part` that a rank has of it."""

    path: Path
    events: Sequence[Event]
    part: Part | None

    @property
    def lanes(self) -> set[int]:
        return {event.lane for event in self.events}


def views(manifest: Manifest, edits: Edits, paths: Sequence[Path] | None) -> tuple[View, ...]:
    """The predicted step and, if there are traces of one, that as measured. Raises InputError."""
    foreseen = predicted(manifest)
    if edits.edited:
        foreseen = replace(foreseen, title=f"{foreseen.title} as compiled, before edits")
    return (foreseen, measured(manifest, paths)) if paths else (foreseen,)


def measured(manifest: Manifest, paths: Sequence[Path]) -> View:
    """The step in the files, on the clock that they have in common.

    Raises InputError if it is not the package's, or if the files are not of one step.
    """
    files = [_read(manifest, path) for path in paths]
    for file in files[1:]:
        _refuse_apart(files[0], file)
    lanes = [lane for file in files for lane in file.lanes]
    if not lanes:  # of a rank without a stage there is neither
        raise InputError(f"{paths[0]} has no measured step: trace one with pipe.trace")
    twice = sorted({lane for lane in lanes if lanes.count(lane) > 1})
    if twice:
        raise InputError(f"of device {twice[0]} there are two traces: give one of each device")
    planned = {event.lane for event in trace.predicted(manifest.estimate.timeline)}
    part = files[0].part
    of = "" if part is None or part.replica is None else f", replica {part.replica}"
    return View(
        f"measured{of}",
        manifest.devices,
        in_time(_joined(files)),
        missing=frozenset(planned - {*lanes}),
    )


def _read(manifest: Manifest, path: Path) -> _Traced:
    """What was predicted stands in the file beside the step, and must be what the package says."""
    events, beside, part = trace.read(path, len(manifest.devices))
    lanes = {event.lane for event in beside}
    foreseen = [e for e in trace.predicted(manifest.estimate.timeline) if e.lane in lanes]
    if not (beside or part) or sorted(map(_rounded, beside)) != sorted(map(_rounded, foreseen)):
        raise InputError(
            f"{path} is a trace of another package than this one of {manifest.model}, or of it "
            "before it was compiled again: trace a step of this one"
        )
    return _Traced(path, events, part)


def _refuse_apart(one: _Traced, other: _Traced) -> None:
    """Raise InputError unless both are of one step, with times that can be compared."""
    for file in (one, other):
        if file.part is None:
            raise InputError(
                f"{file.path} is not of one rank, as files must be that are given together: give "
                "it alone"
            )
    assert one.part is not None
    assert other.part is not None
    if one.part.step != other.part.step:
        raise InputError(
            f"{one.path} has {one.part.step}, {other.path} has {other.part.step}: give files of "
            "the same step of one replica, as the ranks write that trace the same steps"
        )
    if one.part.clock != other.part.clock:
        raise InputError(
            f"{one.path} and {other.path} were written on two machines, whose clocks are too far "
            "apart to be compared: give files of one machine"
        )


def _joined(files: Sequence[_Traced]) -> list[Event]:
    """All events, from when the first rank began."""
    zeros_ms = [0.0 if file.part is None else file.part.zero_ms for file in files]
    return [
        replace(event, start_ms=event.start_ms + later_ms, end_ms=event.end_ms + later_ms)
        for file, zero_ms in zip(files, zeros_ms, strict=True)
        for later_ms in (zero_ms - min(zeros_ms),)
        for event in file.events
    ]


def _rounded(event: Event) -> tuple[int, str, float, float]:
    return event.lane, event.name, round(event.start_ms, 3), round(event.end_ms, 3)
