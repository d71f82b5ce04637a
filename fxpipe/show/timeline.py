"""Draws a step with matplotlib: a row per device, the critical path, memory over time below."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.errors import InputError
from fxpipe.runtime.trace import COPY, RECOMPUTE
from fxpipe.show.boxes import CAPACITY, COLORS, CRITICAL, NAMES, Box, boxes, dark, kinds, line_color
from fxpipe.show.texts import bytes_text, ms_text
from fxpipe.show.view import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In inches, but for the text, which is in points.
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.75, 0.15, 0.26, 0.42
_ROW, _TITLE, _MEMORY, _KEY = 0.24, 0.3, 1.25, 0.17
_NARROWEST, _WIDEST, _PER_BOX = 7.2, 24.0, 0.21
_TEXT, _SMALL, _SMALLEST = 8.0, 6.5, 4.0
_DIGIT = 0.64  # a digit's width as a share of its height
_HEIGHT = 0.84  # of a box, as a share of its row
_NAMED, _KEYS_A_ROW = 15, 3  # devices whose peaks are all told
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def draw(views: Sequence[View], path: Path) -> None:
    """Write a picture of the steps, one under the other on one time axis, as path's suffix says.

    Equal steps give equal bytes. Raises InputError if matplotlib is missing.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "drawing needs matplotlib: pip install 'fxpipe[draw]', or write a .json for "
            "ui.perfetto.dev"
        ) from error
    fullest = max(
        sum(event.lane == lane for _, event in view.actions)
        for view in views
        for lane in range(len(view.lanes))
    )
    inside = min(max(_PER_BOX * fullest, _NARROWEST - _LEFT - _RIGHT), _WIDEST)
    rows = sum(_TITLE + _ROW * len(view.known) for view in views)
    keys = len(_named(views[0].peaks))
    memory = (0.1 + _KEY * -(-keys // _KEYS_A_ROW) + _MEMORY) if keys else 0.0
    width, height = _LEFT + inside + _RIGHT, _TOP + rows + memory + _BOTTOM
    with rc_context({"font.size": _TEXT, "svg.fonttype": "none", "svg.hashsalt": "fxpipe"}):
        figure = Figure(figsize=(width, height))
        until = 1.005 * max(view.step_ms for view in views)
        frame = (_LEFT / width, (_BOTTOM + memory) / height, inside / width, rows / height)
        axes = figure.add_axes(frame)
        _steps(axes, views, points_per_ms=72 * inside / until)
        last = axes
        if memory:
            frame = (_LEFT / width, _BOTTOM / height, inside / width, _MEMORY / height)
            last = figure.add_axes(frame, sharex=axes)
            _memory(last, views[0])
            axes.tick_params(labelbottom=False)
        axes.set_xlim(0, until)
        last.set_xlabel("time (ms)")
        _legend(figure, views)
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=200, metadata=metadata)


def _steps(axes: "Axes", views: Sequence[View], points_per_ms: float) -> None:
    """A row per device, in inches downwards from the top."""
    y = 0.0
    ticks: list[float] = []
    labels: list[str] = []
    for view in views:
        axes.text(0, y + 0.8 * _TITLE, view.heading, fontweight="bold", va="baseline")
        y += _TITLE
        middles = {lane: y + _ROW * (k + 0.5) for k, lane in enumerate(view.known)}
        for middle in middles.values():
            waiting = (middle - _HEIGHT * _ROW / 2, _HEIGHT * _ROW)
            axes.broken_barh([(0, view.step_ms)], waiting, color="#f0f0f0", linewidth=0)
        _boxes(axes, view, middles, points_per_ms)
        _critical(axes, view, middles)
        ticks += middles.values()
        labels += [f"{lane}: {view.lanes[lane]}" for lane in middles]
        y += _ROW * len(middles)
    axes.set_ylim(y + 0.04, 0)
    axes.set_yticks(ticks, labels, fontsize=_SMALL)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=_SMALL)
    axes.spines[["left", "top", "right"]].set_visible(False)


def _boxes(axes: "Axes", view: View, middles: Mapping[int, float], points_per_ms: float) -> None:
    drawn = boxes(view)
    alike: dict[tuple[int, str, str], list[Box]] = {}
    for box in drawn:
        alike.setdefault((box.lane, box.kind, box.color), []).append(box)
    for (lane, kind, color), group in alike.items():
        height, middle = _HEIGHT * _ROW, middles[lane]
        if kind == COPY:
            height, middle = 0.1 * _ROW, middle + 0.47 * _ROW
        axes.broken_barh(
            [(box.start_ms, box.end_ms - box.start_ms) for box in group],
            (middle - height / 2, height),
            facecolors=color,
            edgecolors="white",
            linewidth=0.4,
            hatch="//////" if kind == RECOMPUTE else None,
        )
    for box in drawn:
        start, end = box.room
        size = min(_SMALL, (points_per_ms * (end - start) - 1) / (_DIGIT * (len(box.number) or 1)))
        if box.number and size >= _SMALLEST:
            axes.text(
                (start + end) / 2,
                middles[box.lane],
                box.number,
                fontsize=size,
                color="white" if dark(box.color) else "black",
                ha="center",
                va="center_baseline",
            )


def _critical(axes: "Axes", view: View, middles: Mapping[int, float]) -> None:
    """A line along the boxes of the critical path, from each to the next."""
    spans = {event.name: event for _, event in view.actions}
    xs, ys = [], []
    for name in view.critical:
        event = spans[name]
        xs += [event.start_ms, event.end_ms]
        ys += [middles[event.lane] + 0.36 * _ROW] * 2
    axes.plot(xs, ys, color=CRITICAL, linewidth=1.4, solid_joinstyle="round")


def _memory(axes: "Axes", view: View) -> None:
    """What each device holds; the legend has the most of it."""
    peaks = view.peaks
    unit, scale = next((u, s) for u, s in _UNITS if max(peaks) >= s or s == 1)
    named = _named(peaks)
    for lane, changes in enumerate(view.memory):
        xs = [ms for ms, _ in changes] + [view.step_ms]
        ys = [n_bytes / scale for _, n_bytes in changes]
        color = line_color(lane, len(peaks))
        peak = f"{lane}: peak {bytes_text(peaks[lane])} at {ms_text(view.peaks_ms[lane])}"
        label = peak if lane in named else None
        axes.step(xs, [*ys, ys[-1]], where="post", color=color, linewidth=1.1, label=label)
    for capacity in view.limits:
        axes.axhline(capacity / scale, color=CAPACITY, linewidth=0.9, linestyle=(0, (1, 1.5)))
        axes.annotate(
            "capacity",
            (0, capacity / scale),
            (3, -2),
            textcoords="offset points",
            fontsize=_SMALL,
            color=CAPACITY,
            va="top",
        )
    axes.set_ylim(0, 1.06 * max((*peaks, *view.limits)) / scale)
    axes.set_ylabel(f"predicted memory ({unit})", fontsize=_SMALL)
    axes.tick_params(labelsize=_SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=_KEYS_A_ROW,
        frameon=False,
        fontsize=_SMALL,
        borderaxespad=0.1,
        handlelength=1.4,
    )


def _named(peaks: Sequence[int]) -> Sequence[int]:
    """The devices whose peaks are told: of many the fullest, and both ends of the colours."""
    if len(peaks) <= _NAMED:
        return range(len(peaks))
    return sorted({0, peaks.index(max(peaks)), len(peaks) - 1})


def _legend(figure: "Figure", views: Sequence[View]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found = {kind for view in views for kind in kinds(view)}
    handles: list[Patch | Line2D] = [
        Patch(
            facecolor=color,
            edgecolor="white",
            linewidth=0,
            label=NAMES[kind],
            hatch="//////" if kind == RECOMPUTE else None,
        )
        for kind, color in COLORS.items()
        if kind in found
    ]
    if any(view.critical for view in views):
        handles.append(Line2D([], [], color=CRITICAL, linewidth=1.4, label="critical path"))
    figure.legend(
        handles=handles,
        loc="upper center",
        ncols=len(handles),
        frameon=False,
        fontsize=_TEXT - 1,
        handlelength=1.4,
        columnspacing=1.4,
    )
