"""One step as it ran beside the step as it was predicted, for ui.perfetto.dev and chrome://tracing.

Each lane has a row of what it computes and one of what it copies to others. What a lane does is
marked on the stream that does it, so on CUDA the times are the device's own, not the host's.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from fxpipe.errors import InputError
from fxpipe.runtime import stream
from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.runtime.read_json import refuse_another
from fxpipe.runtime.stream import Device, Mark, Stream
from fxpipe.schedule import Action, Schedule

COPY = "copy"
LOSS = "loss"
RECOMPUTE = "recompute"

_EVENTS = "traceEvents"
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
class _Marked:
    lane: int
    name: str
    kind: str
    start: Mark
    end: Mark


class Recorder:
    """Marks what the lanes of one step do. Any lane's thread may record."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._marked: list[_Marked] = []
        self._starts: list[list[Mark]] = [[] for _ in devices]
        # Events of different devices have no common clock: all begin idle, at one moment.
        self._idle()
        self._zeros = [self._now(lane) for lane in range(len(self._devices))]

    @contextmanager
    def span(self, lane: int, name: str, kind: str) -> Iterator[None]:
        """The block, on the lane's own thread, is what it does as `name`."""
        starts = self._starts[lane]
        starts.append(self._now(lane))
        yield
        self._marked.append(_Marked(lane, name, kind, starts.pop(), self._now(lane)))

    def arrived(self, lane: int) -> None:
        """What the lane's span has waited for is there: it begins now."""
        self._starts[lane][-1] = self._now(lane)

    @contextmanager
    def copying(self, lane: int, name: str, on: Stream) -> Iterator[None]:
        """The block copies something of the lane's on the stream `on`."""
        start = stream.mark(on)
        yield
        self._marked.append(_Marked(lane, name, COPY, start, stream.mark(on)))

    def events(self) -> list[Event]:
        """What was recorded, once all devices are done."""
        self._idle()
        return sorted(
            (
                Event(
                    one.lane,
                    one.name,
                    one.kind,
                    stream.ms_between(self._zeros[one.lane], one.start),
                    stream.ms_between(self._zeros[one.lane], one.end),
                )
                for one in self._marked
            ),
            key=lambda event: (event.start_ms, -event.end_ms),
        )

    def _now(self, lane: int) -> Mark:
        return stream.mark(stream.current_stream(self._devices[lane]))

    def _idle(self) -> None:
        for device in dict.fromkeys(self._devices):
            stream.synchronize(device)


class Trace:
    """As a context, writes the last step of the block to `path`, beside that of `estimate`.

    `use` is told what to record steps with, and at last that nothing is.
    """

    def __init__(
        self,
        path: str | Path,
        devices: Sequence[Device],
        estimate: EstimateSpec,
        use: Callable[["Trace | None"], None],
    ) -> None:
        self._path = Path(path)
        self._devices = tuple(devices)
        self._estimate = estimate
        self._use = use
        self._last: Recorder | None = None

    def recorder(self) -> Recorder:
        """For a step that begins."""
        self._last = Recorder(self._devices)
        return self._last

    def __enter__(self) -> None:
        refuse_another(self._path, *TRACE)
        self._use(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._use(None)
        if kind is not None:
            return
        if self._last is None:
            raise InputError("no step ran while it was to be traced: call pipe.step(...)")
        write(self._path, [*map(str, self._devices)], self._estimate, self._last.events())


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
    path: Path, lanes: Sequence[str], estimate: EstimateSpec, measured: Sequence[Event] = ()
) -> None:
    """Write both steps as Trace Event JSON, each a process, with a row per lane of each.

    What each device holds is a counter of the predicted one, whose critical path has a row too.
    """
    events: list[dict[str, Any]] = []
    foreseen = predicted(estimate.timeline)
    for process, (name, found) in enumerate([("measured", measured), ("predicted", foreseen)]):
        if not found:
            continue
        events.append(_named("process_name", process, 0, name=name))
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
    critical = set(estimate.critical)
    if critical:
        row = 2 * len(lanes)
        events.append(_named("thread_name", 1, row, name="critical path"))
        events.append(_named("thread_sort_index", 1, row, sort_index=row))
        events += [_complete(event, 1, row) for event in foreseen if event.name in critical]
    for lane, changes in enumerate(held(estimate.memory)):
        events += [_counted(f"{lane}: {lanes[lane]} memory", *change) for change in changes]
    text = json.dumps({_EVENTS: events, "displayTimeUnit": "ms"}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


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


def _counted(name: str, ms: float, n_bytes: int) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": 1, "ts": 1e3 * ms, "args": {"bytes": n_bytes}}


def _named(what: str, process: int, row: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": args}
