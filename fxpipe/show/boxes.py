"""A step as coloured boxes: what its drawings, on a page and on paper, have in common."""

from collections.abc import Iterable
from dataclasses import dataclass

from fxpipe.runtime.trace import COPY, LOSS, RECOMPUTE, Event
from fxpipe.schedule import Kind
from fxpipe.show.view import View

# Told apart by the colour-blind too, and by their lightness in print.
COLORS = {
    str(Kind.FORWARD): "#3a6ea5",
    str(Kind.BACKWARD): "#4f9d69",
    str(Kind.INPUT): "#4f9d69",
    str(Kind.WEIGHT): "#efb94f",
    RECOMPUTE: "#a9c4e0",
    LOSS: "#8c8c8c",
    COPY: "#7b5ea7",
}
NAMES = {
    str(Kind.FORWARD): "forward",
    str(Kind.BACKWARD): "backward",
    str(Kind.INPUT): "gradients of inputs",
    str(Kind.WEIGHT): "gradients of weights",
    RECOMPUTE: "recomputation",
    LOSS: "loss",
    COPY: "copies to other devices",
}
CRITICAL, CAPACITY = "#c8102e", "#555555"
_DEVICES = ("#440154", "#3b528b", "#21918c", "#5ec962", "#a0d63b")  # viridis
_PALEST = 0.45  # how far the last of a device's stages goes towards white


@dataclass(frozen=True, slots=True)
class Box:
    """An event as it is drawn. Inner ones lie on their action's, and copies on none.

    `number` is the micro-batch, of an action, and `room` the part of the box where it may stand.
    """

    name: str
    kind: str
    lane: int
    start_ms: float
    end_ms: float
    color: str
    number: str = ""
    room: tuple[float, float] = (0.0, 0.0)


def boxes(view: View) -> tuple[Box, ...]:
    """Those of the step: actions first, then what is inside of them, then copies."""
    inside = view.inside
    tints = _tints(view)
    actions = [
        Box(
            event.name,
            event.kind,
            event.lane,
            event.start_ms,
            event.end_ms,
            _mixed(COLORS[event.kind], "#ffffff", tints[action.stage]),
            str(action.microbatch),
            _room(event, inside[event.name]),
        )
        for action, event in view.actions
    ]
    others = [
        Box(e.name, e.kind, e.lane, e.start_ms, e.end_ms, COLORS[e.kind])
        for kind in (RECOMPUTE, LOSS, COPY)
        for e in view.events
        if e.kind == kind
    ]
    return (*actions, *others)


def kinds(view: View) -> tuple[str, ...]:
    """Those of its events, in the order of the legend."""
    found = {event.kind for event in view.events}
    return tuple(kind for kind in COLORS if kind in found)


def line_color(lane: int, n: int) -> str:
    """That of device `lane` of n: the further apart they are, the more these differ."""
    place = lane / max(1, n - 1) * (len(_DEVICES) - 1)
    k = min(int(place), len(_DEVICES) - 2)
    return _mixed(_DEVICES[k], _DEVICES[k + 1], place - k)


def dark(color: str) -> bool:
    """Whether text on it should be white."""
    red, green, blue = _channels(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.62


def _room(event: Event, inside: Iterable[Event]) -> tuple[float, float]:
    """The longer of the parts before and behind what is inside of it."""
    room = (event.start_ms, event.end_ms)
    for inner in inside:
        parts = (room[0], inner.start_ms), (inner.end_ms, room[1])
        room = max(parts, key=lambda part: part[1] - part[0])
    return room


def _tints(view: View) -> dict[int, float]:
    """How pale each stage is: those of one device differ."""
    stages: dict[int, set[int]] = {}
    for action, event in view.actions:
        stages.setdefault(event.lane, set()).add(action.stage)
    return {
        stage: _PALEST * k / max(1, len(own) - 1)
        for own in stages.values()
        for k, stage in enumerate(sorted(own))
    }


def _mixed(color: str, other: str, share: float) -> str:
    """The color, that share of the way to the other."""
    pairs = zip(_channels(color), _channels(other), strict=True)
    return "#" + "".join(f"{round(255 * (a + (b - a) * share)):02x}" for a, b in pairs)


def _channels(color: str) -> tuple[float, ...]:
    return tuple(int(color[k : k + 2], 16) / 255 for k in (1, 3, 5))
