"""Where everything stands in the chart of a page: steps row by row, and memory below them.

Across it is ms, so that a view box of some ms zooms in; downwards it is pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fxpipe.runtime.trace import COPY
from fxpipe.show.boxes import CAPACITY, CRITICAL, NAMES, Box, boxes, dark, line_color
from fxpipe.show.texts import bytes_text, ms_text
from fxpipe.show.view import View

_AXIS, _TITLE, _ROW, _GAP, _COPY, _MEMORY, _KEY = 18, 28, 24, 4, 3, 120, 16


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A box, with what is told of it where the pointer is."""

    x: float
    y: float
    width: float
    height: float
    color: str
    tip: str


@dataclass(frozen=True, slots=True)
class Number:
    """A micro-batch's number: `room` is how wide its box is, in ms."""

    x: float
    y: float
    room: float
    text: str
    color: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points, as SVG has them."""

    points: str
    color: str
    tip: str


@dataclass(frozen=True, slots=True)
class Label:
    """Text beside the chart, which stays where it is; a `heading` stands above rows."""

    y: float
    text: str
    color: str = "inherit"
    heading: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """All that is drawn, `width` ms wide and `height` pixels high."""

    width: float
    height: int
    rectangles: tuple[Rectangle, ...]
    numbers: tuple[Number, ...]
    lines: tuple[Line, ...]
    labels: tuple[Label, ...]


def chart(views: Sequence[View]) -> Chart:
    """The steps, one under the other on one time axis."""
    rectangles: list[Rectangle] = []
    numbers: list[Number] = []
    lines: list[Line] = []
    labels: list[Label] = []
    width = max(view.step_ms for view in views)
    y = _AXIS
    for view in views:
        labels.append(Label(y + _TITLE / 2, view.heading, heading=True))
        y += _TITLE
        tops = {lane: y + _ROW * k for k, lane in enumerate(view.known)}
        for lane, top in tops.items():
            labels.append(Label(top + _ROW / 2, f"{lane}: {view.lanes[lane]}"))
            idle = Rectangle(0, top + _GAP / 2, view.step_ms, _ROW - _GAP, "#f0f0f0", "idle")
            rectangles.append(idle)
        for box in boxes(view):
            rectangles.append(_rectangle(box, tops[box.lane]))
            if box.number:
                numbers.append(_number(box, tops[box.lane]))
        if view.critical:
            lines.append(_critical(view, y))
        y += _ROW * len(tops)
    if views[0].memory:
        labels.append(Label(y + _TITLE / 2, "predicted memory", heading=True))
        y += _TITLE
        most = max((*views[0].peaks, *views[0].limits))
        n, memory = len(views[0].lanes), max(_MEMORY, _KEY * len(views[0].lanes))
        lines.append(Line(_points([(0, y + memory), (width, y + memory)]), "#bbbbbb", "0 B"))
        for capacity in views[0].limits:
            at = y + memory * (1 - capacity / most)
            tip = f"capacity: {bytes_text(capacity)}"
            lines.append(Line(_points([(0, at), (width, at)]), CAPACITY, tip))
        peaks = zip(views[0].memory, views[0].peaks, views[0].peaks_ms, strict=True)
        for lane, (changes, peak, peak_ms) in enumerate(peaks):
            text, color = f"{lane}: {bytes_text(peak)}", line_color(lane, n)
            labels.append(Label(y + _KEY * (lane + 0.5), text, color))
            held = [*changes, (views[0].step_ms, changes[-1][1])]
            heights = [(ms, y + memory * (1 - n_bytes / most)) for ms, n_bytes in held]
            lines.append(Line(_stairs(heights), color, f"device {text} from {peak_ms:.3f} ms"))
        y += memory
    return Chart(width, y + _GAP, tuple(rectangles), tuple(numbers), tuple(lines), tuple(labels))


def _rectangle(box: Box, top: float) -> Rectangle:
    ms = box.end_ms - box.start_ms
    tip = f"{box.name}, {NAMES[box.kind]}: {ms_text(ms)}, from {box.start_ms:.3f} ms"
    if box.kind == COPY:
        top, height = top + _ROW - _COPY, _COPY
    else:
        top, height = top + _GAP / 2, _ROW - _GAP
    return Rectangle(box.start_ms, top, ms, height, box.color, tip)


def _number(box: Box, top: float) -> Number:
    start, end = box.room
    color = "white" if dark(box.color) else "black"
    return Number((start + end) / 2, top + _ROW / 2, end - start, box.number, color)


def _critical(view: View, top: float) -> Line:
    """Along the boxes of the critical path, from each to the next."""
    events = {event.name: event for _, event in view.actions}
    path = [events[name] for name in view.critical]
    points = [
        (ms, top + _ROW * (event.lane + 1) - 1.25 * _GAP)
        for event in path
        for ms in (event.start_ms, event.end_ms)
    ]
    return Line(_points(points), CRITICAL, "critical path")


def _stairs(heights: Sequence[tuple[float, float]]) -> str:
    """Each height holds until the next."""
    corners = [(after[0], before[1]) for before, after in pairwise(heights)]
    turns = [turn for pair in zip(corners, heights[1:], strict=True) for turn in pair]
    return _points([heights[0], *turns])


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.3f},{y:.1f}" for x, y in points)
