"""One step as it ran beside the step as it was predicted, for ui.perfetto.dev and chrome://tracing.

Each lane has a row of what it computes and one of what it copies to others.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from fxpipe.errors import InputError
from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.schedule import Action, Kind, Schedule

COPY = "copy"
LOSS = "loss"
RECOMPUTE = "recompute"

_EVENTS, _PART = "traceEvents", "otherData"  # as the format has them
TRACE = _EVENTS, "trace of a step"  # what its JSON has, and what it is called

Spans = Sequence[Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that lane `lane` did, in ms from the step's beginning."""

    lane: int
    name: str
    kind: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Part:
    """What a process has of a step over several.

    `step` is alike in all parts of one step of one replica, `replica` None if there is but one. The
    part's times count from `zero_ms` of `clock`, which all processes of a machine read.
    """

    step: str
    replica: int | None
    clock: str
    zero_ms: float


def timeline_of(schedule: Schedule, spans: Spans) -> tuple[str, ...]:
    """When each action of the table begins and ends, as plan.json keeps it."""
    return tuple(
        ", ".join(
            f"{action} {start:.3f} {end:.3f}"
            for action, (start, end) in zip(row, times, strict=True)
        )
        for row, times in zip(schedule.rows, spans, strict=True)
    )


def predicted(timeline: Sequence[str]) -> list[Event]:
    """The events of such a timeline. Raises ScheduleError."""
    events = []
    for lane, row in enumerate(timeline):
        for cell in filter(None, row.split(", ")):
            action, start, end = cell.split()
            kind = Action.parse(action).kind
            events.append(Event(lane, action, kind, float(start), float(end)))
    return events


def memory_of(memory: Iterable[Iterable[tuple[float, int]]]) -> tuple[str, ...]:
    """What each device holds from when on, as plan.json keeps it: only where it differs."""
    return tuple(
        ";".join(f"{next(same)[0]:.3f} {n_bytes}" for n_bytes, same in groupby(held, _bytes))
        for held in memory
    )


def _bytes(change: tuple[float, int]) -> int:
    return change[1]


def held(memory: Sequence[str]) -> list[list[tuple[float, int]]]:
    """(ms, bytes) after each change, by device, of such text."""
    pairs = [[change.split() for change in filter(None, row.split(";"))] for row in memory]
    return [[(float(ms), int(n_bytes)) for ms, n_bytes in row] for row in pairs]


def write(
    path: Path,
    lanes: Mapping[int, str],
    estimate: EstimateSpec,
    measured: Sequence[Event] = (),
    part: Part | None = None,
) -> None:
    """Write both steps of `lanes` as Trace Event JSON, each a process, with a row per lane of each.

    What each device holds is a counter of the predicted one, whose critical path has a row too. So
    that files of the ranks of a step can be opened together, no row has the numbers of another.
    """
    events: list[dict[str, Any]] = []
    replica = None if part is None else part.replica
    first, of = 2 * (replica or 0), "" if replica is None else f", replica {replica}"
    foreseen = [event for event in predicted(estimate.timeline) if event.lane in lanes]
    for process, name, found in (
        (first, "measured", measured),
        (first + 1, "predicted", foreseen),
    ):
        if not found:
            continue
        events.append(_named("process_name", process, 0, name=name + of))
        events.append(_named("process_sort_index", process, 0, sort_index=process))
        rows: dict[int, str] = {}
        for event in found:
            row = 2 * event.lane + (event.kind == COPY)
            rows[row] = f"{event.lane}: {lanes[event.lane]}" + (
                " copies" if event.kind == COPY else ""
            )
            events.append(_complete(event, process, row))
        for row, text in sorted(rows.items()):
            events.append(_named("thread_name", process, row, name=text))
            events.append(_named("thread_sort_index", process, row, sort_index=row))
    critical = [event for event in foreseen if event.name in set(estimate.critical)]
    if critical:
        row = 2 * len(estimate.timeline)
        events.append(_named("thread_name", first + 1, row, name="critical path"))
        events.append(_named("thread_sort_index", first + 1, row, sort_index=row))
        events += [_complete(event, first + 1, row) for event in critical]
    for lane, changes in enumerate(held(estimate.memory)):
        if lane in lanes:
            name = f"{lane}: {lanes[lane]} memory"
            events += [_counted(name, first + 1, *change) for change in changes]
    whole: dict[str, Any] = {_EVENTS: events, "displayTimeUnit": "ms"}
    if part is not None:
        whole[_PART] = asdict(part)
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def read(path: Path, n: int) -> tuple[list[Event], list[Event], Part | None]:
    """What was measured of n lanes, what was predicted beside it, and of what it is a part.

    Raises InputError if the file is none that `write` wrote.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = [event for event in data[_EVENTS] if event["ph"] == "X"]
        measured, foreseen = (_read_events(found, process, n) for process in (0, 1))
        return measured, foreseen, Part(**data[_PART]) if _PART in data else None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path} is no trace of a step: write one with pipe.trace({path.name!r})"
        ) from error


def _read_events(found: list[dict[str, Any]], process: int, n: int) -> list[Event]:
    """A row for what a lane computes and one for its copies; any further one repeats some."""
    if not {event["cat"] for event in found} <= {*Kind, RECOMPUTE, LOSS, COPY}:
        raise ValueError("it has events of other kinds")
    return [
        Event(
            int(event["tid"]) // 2,
            str(event["name"]),
            str(event["cat"]),
            event["ts"] / 1e3,
            (event["ts"] + event["dur"]) / 1e3,
        )
        for event in found
        if event["pid"] % 2 == process and event["tid"] < 2 * n
    ]


def _complete(event: Event, process: int, row: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.kind,
        "pid": process,
        "tid": row,
        "ts": 1e3 * event.start_ms,
        "dur": 1e3 * (event.end_ms - event.start_ms),
    }


def _counted(name: str, process: int, ms: float, n_bytes: int) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": process, "ts": 1e3 * ms, "args": {"bytes": n_bytes}}


def _named(what: str, process: int, row: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": args}
