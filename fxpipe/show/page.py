"""`fxpipe report`: a package as one page of HTML that needs nothing else, and no network."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from fxpipe.edits import Edits
from fxpipe.runtime.manifest import CandidateSpec, Manifest
from fxpipe.show.boxes import CAPACITY, COLORS, CRITICAL, NAMES, kinds
from fxpipe.show.chart import chart
from fxpipe.show.comparison import compare, figures
from fxpipe.show.package import package_json
from fxpipe.show.texts import bytes_text, devices_text, ms_text
from fxpipe.show.view import View

_TEMPLATES = Path(__file__).parent / "templates"


def page(manifest: Manifest, edits: Edits, views: Sequence[View]) -> str:
    """The page: the plan, and its step as predicted and, if there is a second view, as measured.

    All that comes from the model is escaped.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"bytes": bytes_text, "ms": ms_text}
    facts = package_json(manifest, edits)
    found = {kind for view in views for kind in kinds(view)}
    legend = [(NAMES[kind], color) for kind, color in COLORS.items() if kind in found]
    if any(view.critical for view in views):
        legend.append(("critical path", CRITICAL))
    if views[0].limits:
        legend.append(("capacity", CAPACITY))
    return environment.get_template("report.html.j2").render(
        facts=facts,
        manifest=manifest,
        devices=devices_text(manifest.devices),
        cuts=_cuts(facts["values"]),
        candidates=_candidates(manifest),
        edits=[f"{how} {', '.join(names)}" for how, names in facts["files"].items() if names],
        chart=chart(views),
        legend=legend,
        measured=len(views) > 1,
        figures=compare(figures(views[0]), [figures(view) for view in views[1:]]),
    )


def _candidates(manifest: Manifest) -> list[tuple[CandidateSpec, bool]]:
    """The plan among those that it was weighed against, the shortest step first; which it is."""
    estimate = manifest.estimate
    own = CandidateSpec(
        manifest.schedule,
        manifest.microbatches,
        len(manifest.stages),
        estimate.step_ms,
        estimate.bubble,
        max(estimate.peak_bytes),
        fits=True,
    )
    every = [(own, True), *((other, False) for other in manifest.candidates)]
    return sorted(every, key=lambda one: one[0].step_ms)


def _cuts(values: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The values that go from one stage to another, and their bytes together."""
    ends: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for value in sorted(values, key=lambda one: (one["from"], one["to"])):
        ends.setdefault((value["from"], value["to"]), []).append(value)
    return [
        {"from": source, "to": target, "values": them, "bytes": sum(one["bytes"] for one in them)}
        for (source, target), them in ends.items()
    ]
