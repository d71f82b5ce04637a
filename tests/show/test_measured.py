"""A step is looked at as traces of this very package have it: one of all, or one of each rank."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plans import TIMELINE, stepped

from fxpipe.errors import InputError
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.trace import Event, Part, write
from fxpipe.show import view
from fxpipe.show.chart import chart
from fxpipe.show.comparison import figures
from fxpipe.show.measured import measured
from fxpipe.show.timeline import draw

PART = Part("step 3 of replica 0 of a", None, "here", 100.0)
FIRST, SECOND = (Event(0, "0F0", "F", 0.5, 2.0), Event(1, "1F0", "F", 0.0, 1.0))


def events(*found: tuple[int, str, str, float, float]) -> list[Event]:
    return [Event(*one) for one in found]


def traced(path: Path, of: Manifest, ran: list[Event]) -> Path:
    write(path, dict(enumerate(of.devices)), of.estimate, ran)
    return path


def of_rank(path: Path, event: Event, part: Part | None) -> Path:
    plan = stepped()
    write(path, {event.lane: "cpu"}, plan.estimate, [event], part)
    return path


def test_a_trace_is_read_as_it_was_recorded(tmp_path):
    ran = events((0, "0F0", "F", 0.5, 2.0), (0, "0 to 1", "copy", 2.0, 2.5))
    seen = measured(stepped(), [traced(tmp_path / "t.json", stepped(), ran)])
    assert seen.events == (*ran,)
    assert seen.step_ms == 2.0


def test_the_trace_of_another_package_is_refused(tmp_path):
    other = stepped((TIMELINE[0], TIMELINE[1].replace("7.000", "7.001")))
    path = traced(tmp_path / "t.json", other, events((0, "0F0", "F", 0.5, 2.0)))
    with pytest.raises(InputError, match=r"trace of another package than this one of Tied"):
        measured(stepped(), [path])


def test_a_trace_without_a_measured_step_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no measured step"):
        measured(stepped(), [traced(tmp_path / "t.json", stepped(), [])])


@pytest.mark.parametrize("text", ["no json", "[]", '{"traceEvents": [1]}', '{"traceEvents": 1}'])
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InputError, match="is no trace of a step"):
        measured(stepped(), [tmp_path / "t.json"])


def test_of_one_rank_its_device_alone_is_shown(tmp_path):
    seen = measured(stepped(), [of_rank(tmp_path / "r1.json", SECOND, PART)])
    assert seen.events == (SECOND,)
    assert seen.heading == "measured, device 1 alone: 1.00 ms"
    rows = [label.text for label in chart([view.predicted(stepped()), seen]).labels]
    assert [text for text in rows if text.endswith(": cpu")] == ["0: cpu", "1: cpu", "1: cpu"]
    assert figures(seen) == {("stage 1", "forward"): 1.0, ("device 1", "busy"): 1.0}
    draw([view.predicted(stepped()), seen], tmp_path / "step.svg")
    assert "measured, device 1 alone" in (tmp_path / "step.svg").read_text()


def test_files_of_several_ranks_are_one_step_from_when_the_first_began(tmp_path):
    later = replace(PART, zero_ms=102.5)
    paths = [
        of_rank(tmp_path / "r1.json", SECOND, later),
        of_rank(tmp_path / "r0.json", FIRST, PART),
    ]
    seen = measured(stepped(), paths)
    assert seen.events == (FIRST, Event(1, "1F0", "F", 2.5, 3.5))
    assert seen.heading == "measured: 3.50 ms, bubble 64%"


def test_ranks_files_have_no_row_in_common(tmp_path):
    parts = [replace(PART, replica=replica) for replica in (0, 1)]
    rows = []
    for k, (part, event) in enumerate((p, e) for p in parts for e in (FIRST, SECOND)):
        path = of_rank(tmp_path / f"{k}.json", event, part)
        found = json.loads(path.read_text())["traceEvents"]
        rows.append({(e["pid"], e["tid"]) for e in found if e["ph"] == "X" and e["tid"] < 4})
        assert {e["args"]["name"] for e in found if e["name"] == "process_name"} == {
            f"{what}, replica {part.replica}" for what in ("measured", "predicted")
        }
        assert measured(stepped(), [path]).title == f"measured, replica {part.replica}"
    assert sum(map(len, rows)) == len(set.union(*rows)) == 8


@pytest.mark.parametrize(
    ("event", "part", "message"),
    [
        (SECOND, None, r"r1\.json is not of one rank, .* give it alone"),
        (SECOND, replace(PART, step="step 4 of replica 0 of a"), r"has step 3 .* has step 4"),
        (SECOND, replace(PART, clock="there"), "two machines, whose clocks"),
        (FIRST, PART, "of device 0 there are two traces"),
    ],
)
def test_files_that_are_not_of_one_step_are_refused(tmp_path, event, part, message):
    paths = [
        of_rank(tmp_path / "r0.json", FIRST, PART),
        of_rank(tmp_path / "r1.json", event, part),
    ]
    with pytest.raises(InputError, match=message):
        measured(stepped(), paths)
