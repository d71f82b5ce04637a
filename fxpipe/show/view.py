"""A step as it is looked at: what each device did when, and what of it is predicted."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from fxpipe.errors import InputError
from fxpipe.runtime import trace
from fxpipe.runtime.checkpoint import recomputes
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.trace import COPY, LOSS, RECOMPUTE, Event
from fxpipe.schedule import Action, Kind
from fxpipe.show.texts import ms_text

# The timeline is kept to a thousandth of a ms: two roundings, for each of two actions.
_ROUNDING_MS = 0.002
_NEAR = 1.5  # of the fullest device's peak


@dataclass(frozen=True, slots=True)
class View:
    """One step. `events` are actions, and what is done inside of them: recomputation and losses.

    `lanes` are the devices by name; `memory` is what each holds, (ms, bytes) from then on, and
    `critical` the actions that the step's length hangs on, in order of time, where they are known,
    as is `capacity_bytes`, what each device has room for. Of devices that are `missing` nothing is
    known: then neither is it of the whole step, which then only ends where the others do.
    """

    title: str
    lanes: tuple[str, ...]
    events: tuple[Event, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...] = ()
    critical: tuple[str, ...] = ()
    capacity_bytes: tuple[int, ...] = ()
    missing: frozenset[int] = frozenset()

    @property
    def known(self) -> tuple[int, ...]:
        """The devices that it is of, by number."""
        return tuple(lane for lane in range(len(self.lanes)) if lane not in self.missing)

    @property
    def heading(self) -> str:
        """What it is, and how long; of some devices alone, how long those take."""
        if not self.missing:
            return f"{self.title}: {ms_text(self.step_ms)}, bubble {self.bubble:z.0%}"
        *numbers, last = map(str, self.known)
        devices = f"devices {', '.join(numbers)} and {last}" if numbers else f"device {last}"
        return f"{self.title}, {devices} alone: {ms_text(self.step_ms)}"

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
        """The idle share of all devices' time, if none is missing."""
        busy = sum(event.end_ms - event.start_ms for _, event in self.actions)
        return max(0.0, 1 - busy / (len(self.lanes) * self.step_ms))


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
        in_time([*events, *_losses(manifest, events), *_recomputed(manifest, events)]),
        # Of changes at one moment the last: what is let go of comes before what is taken.
        tuple(tuple(dict(changes).items()) for changes in memory),
        estimate.critical,
        estimate.capacity_bytes,
    )


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


def in_time(events: Iterable[Event]) -> tuple[Event, ...]:
    """As a view has them."""
    return tuple(sorted(events, key=_time))


def _time(event: Event) -> tuple[bool, float, bool]:
    """By time, what is inside of an action behind it; copies are by themselves."""
    return event.kind == COPY, event.start_ms, event.kind in (RECOMPUTE, LOSS)
