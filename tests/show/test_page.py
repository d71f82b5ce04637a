"""The page: whole in itself, true to the plan, safe from its names, and alive in a browser."""

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plans import stepped

from fxpipe.edits import Edits
from fxpipe.runtime.manifest import CandidateSpec, Manifest, PartSpec, SegmentSpec
from fxpipe.runtime.trace import Event
from fxpipe.show import view
from fxpipe.show.page import page
from fxpipe.show.view import View

MEASURED = View("measured", ("cpu", "cpu"), (Event(0, "0F7", "F", 0.0, 20.0),))
EVIL = "<script>alert(1)</script>&\"'"
# What HTML and SVG never close.
VOID = {"meta", "br"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Parsed(HTMLParser):
    """The tags and texts of a page whose tags are all closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and not {"script", "style"} & set(self.open):
            self.texts.append(" ".join(data.split()))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def text(manifest: Manifest | None = None, *more: View, edits: Edits | None = None) -> str:
    manifest = manifest or stepped()
    return page(manifest, edits or Edits(), (view.predicted(manifest), *more))


def test_page_has_each_part_of_the_plan():
    parsed = Parsed(text())
    assert {"Tied", "Step", "Stages", "Cuts", "Predicted"} <= set(parsed.texts)
    for said in ("3 stages on 2 CPU lanes", "predicted step 11.0 ms, bubble 20%", "gap 1.0%"):
        assert said in " ".join(parsed.texts)
    assert [row for row in parsed.texts if re.fullmatch(r"stage_\d.py", row)] == [
        "stage_0.py",
        "stage_1.py",
        "stage_2.py",
    ]
    assert parsed.texts.count("portal") == 1


def test_every_action_is_a_box_that_tells_when():
    parsed = Parsed(text())
    idle, actions, recomputations = 2, 7, 1
    assert len(parsed.all("rect")) == idle + actions + recomputations
    assert "0I0, gradients of inputs: 3.00 ms, from 7.000 ms" in parsed.texts
    assert "again 0F0, recomputation: 1.00 ms, from 7.000 ms" in parsed.texts
    (svg,) = parsed.all("svg")
    assert svg["viewbox"].startswith("0 0 11.0 ")


def test_memory_goes_in_stairs_below():
    points = [line["points"] for line in Parsed(text()).all("polyline")]
    critical, zero, first, second = points
    assert len(critical.split()) == 4
    moments = [pair.split(",")[0] for pair in first.split()]
    assert moments == ["0.000", "2.000", "2.000", "11.000", "11.000"]
    bottom = float(zero.split()[0].split(",")[1])
    highest = min(float(pair.split(",")[1]) for pair in first.split())
    assert bottom - highest == 120
    assert len(second.split()) == 3
    assert "device 0: 3 B from 2.000 ms" in Parsed(text()).texts


def test_a_measured_step_is_beside_the_predicted_one():
    parsed = Parsed(text(None, MEASURED))
    assert "Predicted and measured" in parsed.texts
    assert "measured: 20.0 ms, bubble 50%" in parsed.texts
    assert "-45%" in parsed.texts  # 11 ms for 20
    assert parsed.all("svg")[0]["viewbox"].startswith("0 0 20.0 ")


def test_what_is_not_known_is_left_out():
    plain = stepped()
    plain = replace(plain, estimate=replace(plain.estimate, memory=(), critical=()), gap=None)
    parsed = Parsed(text(plain))
    assert not parsed.all("polyline")
    assert not [said for said in parsed.texts if "critical" in said or "gap" in said]


def test_segments_and_parts_are_named():
    plan = stepped()
    segments = (SegmentSpec("h.0", "h.3", 9), SegmentSpec("norm", "norm", 1))
    stages = (replace(plan.stages[0], segments=segments), *plan.stages[1:])
    part = PartSpec(("encoder",), "x", {"tensor": 0}, 0.75, "")
    said = " ".join(Parsed(text(replace(plan, stages=stages, part=part))).texts)
    assert "stage 0 recomputes h.0-h.3 , norm in backward" in said
    assert "of the model it is a part, 75% of the parameters: encoder" in said


def test_names_of_the_model_stay_text():
    evil = stepped()
    stages = list(evil.stages)
    (port, *ports) = stages[1].inputs
    stages[1] = replace(stages[1], inputs=(replace(port, value=EVIL), *ports))
    evil = replace(evil, model=EVIL, devices=(EVIL, EVIL), stages=tuple(stages))
    parsed = Parsed(text(evil, edits=Edits(added=(EVIL,))))
    assert len(parsed.all("script")) == 1
    assert parsed.texts.count(EVIL) == 2  # the heading, and the value
    assert f"files added {EVIL}" in parsed.texts


def test_page_needs_nothing_else():
    parsed = Parsed(text(None, MEASURED))
    assert not {"src", "href", "data"} & {name for _, found in parsed.tags for name in found}
    assert "url(" not in text()
    assert "default-src 'none'" in str(parsed.all("meta"))


def seen(path: Path, script: str) -> tuple[str, list[str]]:
    """The page in a browser after the script: its tags, and what it said on the console."""
    html = path.read_text().replace("</body>", f"<script>{script}</script></body>")
    path.write_text(html)
    quiet = ["gpu", "quic", "first-run", "background-networking", "component-update", "sync"]
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        *(f"--{'no' if name == 'first-run' else 'disable'}-{name}" for name in quiet),
        f"--user-data-dir={path.parent / 'user'}",
        "--enable-logging=stderr",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, said


ZOOM = """
const step = document.getElementById("step");
const boxes = [];
const note = () => boxes.push(step.getAttribute("viewBox").split(" ").map(Number));
const press = (label) => {
  [...document.querySelectorAll("button")].find((one) => one.textContent === label).click();
  note();
};
note();
const middle = step.getBoundingClientRect().left + step.clientWidth / 2;
step.dispatchEvent(new WheelEvent("wheel", { deltaY: -500, clientX: middle, cancelable: true }));
note();
step.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
note();
press("whole step");
press("zoom in");
document.body.dataset.boxes = JSON.stringify(boxes);
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed to show the page in")
def test_the_step_zooms_and_moves_in_a_browser(tmp_path):
    file = tmp_path / "report.html"
    file.write_text(text(None, MEASURED))
    html, said = seen(file, ZOOM)
    assert said == []
    found = re.search(r'data-boxes="([^"]*)"', html)
    assert found is not None
    whole, wheeled, moved, again, half = eval(found[1])
    height = whole[3]
    assert whole == again == [0, 0, 20, height]
    assert wheeled == pytest.approx([10 - wheeled[2] / 2, 0, 20 * 1.002**-500, height], abs=0.05)
    assert moved == pytest.approx([wheeled[0] + 0.2 * wheeled[2], 0, *wheeled[2:]])
    assert half == [5, 0, 10, height]
    assert "<line" in html  # the ticks


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed to show the page in")
def test_an_error_on_the_page_would_be_seen(tmp_path):
    file = tmp_path / "report.html"
    file.write_text(text())
    assert seen(file, "nothing.here()")[1] != []


def test_candidates_are_there_the_shortest_step_first_and_the_plan_among_them():
    others = (
        CandidateSpec("gpipe", 1, 2, 12.0, 0.3, 2**30, fits=True),
        CandidateSpec("zb-v", 1, 4, 9.0, 0.1, 2**31, fits=False),
    )
    texts = Parsed(text(replace(stepped(), candidates=others))).texts
    after = texts[texts.index("Candidates") :]
    places = [after.index(said) for said in ("zb-v", "does not fit", "this plan", "gpipe")]
    assert places == sorted(places)
    assert "Candidates" not in Parsed(text()).texts
