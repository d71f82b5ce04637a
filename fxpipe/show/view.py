"""A step as it is looked at: what each device did when, as predicted or as a trace has it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from fxpipe.errors import InputError
from fxpipe.runtime import trace
from fxpipe.runtime.checkpoint import recomputes
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.trace import COPY, LOSS, RECOMPUTE, Event
from fxpipe.schedule import Action, Kind

# The timeline is kept to a thousandth of a ms: two roundings, for each of two actions.
_ROUNDING_MS = 0.002
_NEAR = 1.5  # of the fullest device's peak


@dataclass(frozen=True, slots=True)
class View:
    """One step. `events` are actions, and what is done inside of them: recomputation and losses.

    `lanes` are the devices by name; `memory` is what each holds, (ms, bytes) from then on, and
    `critical` the actions that the step's length hangs on, in order of time, where they are known,
    as is `capacity_bytes`, what each device has room for.
    """

    title: str
    lanes: tuple[str, ...]
    events: tuple[Event, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...] = ()
    critical: tuple[str, ...] = ()
    capacity_bytes: tuple[int, ...] = ()

    @property
    def step_ms(self) -> float:
        """When the last action ends."""
        return max((event.end_ms for event in self.events if event.kind != COPY), default=0.0)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The most that each device holds, where memory is known."""
        return tuple(max(n_bytes for _, n_bytes in changes) for changes in self.memory)

    @property
    def peaks_ms(self) -> tuple[float, ...]:
        """When each device first holds the most, where memory is known."""
        return tuple(max(changes, key=itemgetter(1))[0] for changes in self.memory)

    @property
    def limits(self) -> tuple[int, ...]:
        """The capacities of devices that are not far above all that is held."""
        near = _NEAR * max(self.peaks, default=0)
        return tuple(sorted({capacity for capacity in self.capacity_bytes if capacity <= near}))

    @property
    def actions(self) -> tuple[tuple[Action, Event], ...]:
        """The events of the schedule's actions, in order of time."""
        kinds = set(Kind)
        return tuple((Action.parse(e.name), e) for e in self.events if e.kind in kinds)

    @property
    def inside(self) -> dict[str, tuple[Event, ...]]:
        """What is done inside of each action, by the action's name."""
        under: dict[int, str] = {}  # the lane's action
        found: dict[str, tuple[Event, ...]] = {}
        for event in self.events:
            if event.kind in set(Kind):
                under[event.lane] = event.name
                found[event.name] = ()
            elif event.kind != COPY and event.lane in under:
                found[under[event.lane]] += (event,)
        return found

    @property
    def bubble(self) -> float:
        """The idle share of all devices' time."""
        busy = sum(event.end_ms - event.start_ms for _, event in self.actions)
        return max(0.0, 1 - busy / (len(self.lanes) * self.step_ms))


def views(manifest: Manifest, trace: Path | None) -> tuple[View, ...]:
    """The predicted step and, if there is a trace, the measured one. Raises InputError."""
    foreseen = predicted(manifest)
    return (foreseen,) if trace is None else (foreseen, measured(manifest, trace))


def predicted(manifest: Manifest) -> View:
    """The step that the package was compiled for. Raises InputError if plan.json has none."""
    estimate, n = manifest.estimate, len(manifest.devices)
    try:
        events, memory = trace.predicted(estimate.timeline), trace.held(estimate.memory)
        known = {event.name for event in events} >= set(estimate.critical)
        fits = known and len(estimate.timeline) == n and len(memory) in (0, n) and all(memory)
    except ValueError:
        fits = False
    if not fits or not events:
        raise InputError(
            "plan.json's estimate has no timeline, or memory, of the step that can be read, with a "
            "row for each device: compile the package again"
        )
    return View(
        "predicted",
        manifest.devices,
        tuple(
            sorted([*events, *_losses(manifest, events), *_recomputed(manifest, events)], key=_time)
        ),
        # Of changes at one moment the last: what is let go of comes before what is taken.
        tuple(tuple(dict(changes).items()) for changes in memory),
        estimate.critical,
        estimate.capacity_bytes,
    )


def measured(manifest: Manifest, path: Path) -> View:
    """The step in the file that `pipe.trace` wrote. Raises InputError if it is not the package's.

    What was predicted stands in the file beside the step, and must be what the package says.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = [event for event in data["traceEvents"] if event["ph"] == "X"]
        actual, beside = (_events(found, process, len(manifest.devices)) for process in (0, 1))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path} is no trace of a step: write one with pipe.trace({path.name!r})"
        ) from error
    foreseen = trace.predicted(manifest.estimate.timeline)
    if sorted(map(_rounded, beside)) != sorted(map(_rounded, foreseen)):
        raise InputError(
            f"{path} is a trace of another package than this one of {manifest.model}, or of it "
            "before it was compiled again: trace a step of this one"
        )
    if not actual:
        raise InputError(f"{path} has only the predicted step: trace one with pipe.trace")
    return View("measured", manifest.devices, tuple(sorted(actual, key=_time)))


def _events(found: list[dict[str, Any]], process: int, n_lanes: int) -> list[Event]:
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
        if event["pid"] == process and event["tid"] < 2 * n_lanes
    ]


def _losses(manifest: Manifest, events: list[Event]) -> Iterator[Event]:
    """What the last stage's backwards are planned to begin with."""
    last, loss_ms = len(manifest.stages) - 1, manifest.estimate.loss_ms
    for event in events:
        action = Action.parse(event.name)
        if loss_ms and action.stage == last and action.kind.sends_back:
            name, end_ms = f"loss {action.microbatch}", event.start_ms + loss_ms
            yield Event(event.lane, name, LOSS, event.start_ms, end_ms)


def _recomputed(manifest: Manifest, events: list[Event]) -> Iterator[Event]:
    """What backwards that recompute take longer than the stage's: its forward, run again first.

    On the last stage, behind the loss. A backward may also wait for a host that launches it: no
    more is recomputed than the forward took.
    """
    last = len(manifest.stages) - 1
    forward: dict[tuple[int, int], float] = {}
    backward: dict[tuple[int, int], float] = {}
    actions = [(Action.parse(event.name), event) for event in events]
    for action, event in actions:
        place = (action.stage, action.microbatch)
        taken = forward if action.kind is Kind.FORWARD else backward
        taken[place] = taken.get(place, 0.0) + event.end_ms - event.start_ms
    for action, event in actions:
        stage, place = manifest.stages[action.stage], (action.stage, action.microbatch)
        again = stage.segments or recomputes(stage, action.microbatch, manifest.microbatches)
        if action.kind.sends_back and again:
            again_ms = min(forward.get(place, 0.0), backward[place] - stage.backward_ms)
            if again_ms > _ROUNDING_MS:
                name = f"again {action.stage}F{action.microbatch}"
                start_ms = event.start_ms
                start_ms += manifest.estimate.loss_ms if action.stage == last else 0.0
                yield Event(event.lane, name, RECOMPUTE, start_ms, start_ms + again_ms)


def _rounded(event: Event) -> tuple[int, str, float, float]:
    return event.lane, event.name, round(event.start_ms, 3), round(event.end_ms, 3)


def _time(event: Event) -> tuple[bool, float, bool]:
    """By time, what is inside of an action behind it; copies are by themselves."""
    return event.kind == COPY, event.start_ms, event.kind in (RECOMPUTE, LOSS)
