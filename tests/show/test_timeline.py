"""The drawing of a step: every action's box and number, the critical path, memory below."""

import re
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from plans import stepped

from fxpipe.errors import InputError
from fxpipe.runtime.trace import Event
from fxpipe.show import timeline, view
from fxpipe.show.chart import chart
from fxpipe.show.view import View

MEASURED = View(
    "measured",
    ("cpu", "cpu"),
    (Event(0, "0F7", "F", 0.0, 20.0), Event(0, "7 to 1", "copy", 15.0, 18.0)),
)


def texts(path) -> list[str]:
    found = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()).strip() for text in found]


def test_svg_has_rows_numbers_legend_and_peaks(tmp_path):
    timeline.draw([view.predicted(stepped())], tmp_path / "step.svg")
    found = texts(tmp_path / "step.svg")
    assert "predicted: 11.0 ms, bubble 50%" in found
    assert [text for text in found if re.fullmatch(r"\d: cpu", text)] == ["0: cpu", "1: cpu"]
    assert {"forward", "gradients of inputs", "recomputation", "critical path"} <= set(found)
    assert {"0: peak 3 B at 2.00 ms", "1: peak 2 B at 1.00 ms"} <= set(found)


def test_measured_step_stands_below_on_the_same_axis(tmp_path):
    timeline.draw([view.predicted(stepped()), MEASURED], tmp_path / "step.svg")
    found = texts(tmp_path / "step.svg")
    assert "measured: 20.0 ms, bubble 50%" in found
    assert found.count("0: cpu") == 2
    assert {"7", "copies to other devices"} <= set(found)


def test_equal_steps_give_equal_pictures(tmp_path):
    for name in ("one.svg", "two.svg", "one.png", "two.png"):
        timeline.draw([view.predicted(stepped())], tmp_path / name)
    for suffix in ("svg", "png"):
        one, two = (tmp_path / f"{name}.{suffix}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_capacity_is_drawn_where_it_is_near(tmp_path):
    plan = stepped()
    for capacity, drawn in ((4, True), (2**30, False)):
        estimate = replace(plan.estimate, capacity_bytes=(capacity,) * 2)
        seen = view.predicted(replace(plan, estimate=estimate))
        timeline.draw([seen], tmp_path / "step.svg")
        assert ("capacity" in texts(tmp_path / "step.svg")) == drawn
        tips = [line.tip for line in chart([seen]).lines]
        assert ("capacity: 4 B" in tips) == drawn


def test_of_many_devices_the_fullest_and_both_ends_of_the_colours_are_told(tmp_path):
    held = tuple(((0.0, 100 + lane if lane < 18 else 7),) for lane in range(20))
    many = View("predicted", ("cpu",) * 20, MEASURED.events, memory=held)
    timeline.draw([many], tmp_path / "step.svg")
    told = [text for text in texts(tmp_path / "step.svg") if "peak" in text]
    assert told == [
        f"{peak} at 0.00 ms" for peak in ("0: peak 100 B", "17: peak 117 B", "19: peak 7 B")
    ]


def test_what_is_not_known_is_left_out(tmp_path):
    timeline.draw([MEASURED], tmp_path / "step.svg")
    assert not [text for text in texts(tmp_path / "step.svg") if "peak" in text or "path" in text]


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'fxpipe\[draw\]'"):
        timeline.draw([MEASURED], tmp_path / "step.svg")
