"""Figures of a step, predicted beside measured."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from fxpipe.runtime.trace import COPY
from fxpipe.schedule import Action, Kind
from fxpipe.show.boxes import NAMES, kinds
from fxpipe.show.table import new_table
from fxpipe.show.texts import bytes_text, ms_text
from fxpipe.show.view import View

STEP, BUBBLE, PEAK = ("step", "time"), "bubble", "peak memory"

# Of what (the step, a stage, all stages, a device), and which: in ms, but for shares and bytes.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `unit` is "ms", "share" or "bytes"; a side that does not know it has None."""

    of: str
    name: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def off(self) -> float | None:
        """How far the prediction lies above what was measured, as a share of that."""
        if self.predicted is None or not self.measured or self.unit == "share":
            return None
        return self.predicted / self.measured - 1

    @property
    def texts(self) -> tuple[str, str, str]:
        """What was predicted, what was measured and how far that is off, in units."""
        text = {"ms": ms_text, "share": "{:z.0%}".format, "bytes": bytes_text}[self.unit]
        return (
            "" if self.predicted is None else text(self.predicted),
            "" if self.measured is None else text(self.measured),
            "" if self.off is None else f"{self.off:+z.0%}",
        )


def figures(view: View) -> dict[Key, float]:
    """Those of a step.

    A stage's are of one micro-batch, in the mean, and its backward is both halves together. What a
    stage recomputes, and the loss, count by themselves. Where devices are missing, those are left
    out that only all of them together have.
    """
    own: dict[str, float] = {}
    totals = dict.fromkeys(kinds(view), 0.0)
    busy = dict.fromkeys(view.known, 0.0)
    inside = view.inside
    for action, event in view.actions:
        own[event.name] = event.end_ms - event.start_ms
        busy[event.lane] += own[event.name]
        for inner in inside[event.name]:
            own[event.name] -= inner.end_ms - inner.start_ms
            totals[inner.kind] += inner.end_ms - inner.start_ms
        totals[action.kind] += own[event.name]
    found: dict[Key, float] = {}
    if not view.missing:
        found |= {STEP: view.step_ms, ("step", BUBBLE): view.bubble}
    by_stage: dict[Key, list[Action]] = {}
    for action in sorted((action for action, _ in view.actions), key=lambda one: one.stage):
        name = "forward" if action.kind is Kind.FORWARD else "backward"
        by_stage.setdefault((f"stage {action.stage}", name), []).append(action)
    for key, actions in by_stage.items():
        total = sum(own[str(action)] for action in actions)
        found[key] = total / len({action.microbatch for action in actions})
    for kind, total in totals.items():
        if kind != COPY and not view.missing:
            found["all stages", NAMES[kind]] = total
    for lane, busy_ms in busy.items():
        found[f"device {lane}", "busy"] = busy_ms
        if not view.missing:
            found[f"device {lane}", BUBBLE] = 1 - busy_ms / view.step_ms
    return found


def compare(
    predicted: Mapping[Key, float], measured: Sequence[Mapping[Key, float]]
) -> tuple[Figure, ...]:
    """Each figure of the prediction, and of several steps the median, by what it is of."""
    steps = {key: None for side in (predicted, *measured) for key in side}
    groups = list(dict.fromkeys(of for of, _ in steps))
    return tuple(
        Figure(
            *key,
            unit={BUBBLE: "share", PEAK: "bytes"}.get(key[1], "ms"),
            predicted=predicted.get(key),
            measured=_median([step[key] for step in measured if key in step]),
        )
        for key in sorted(steps, key=lambda key: groups.index(key[0]))
    )


def comparison_json(found: Sequence[Figure]) -> list[dict[str, Any]]:
    """The figures as they are; `off` is the prediction's share over what was measured, less 1."""
    return [{**asdict(figure), "off": figure.off} for figure in found]


def comparison_table(found: Sequence[Figure]) -> Table:
    """A row for each figure, named where another thing's begin."""
    table = new_table("", "", "predicted", "measured", "off", left=("",))
    before = None
    for figure in found:
        table.add_row(figure.of if figure.of != before else "", figure.name, *figure.texts)
        before = figure.of
    return table


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
