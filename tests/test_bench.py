"""A bench runs whatever a package takes, and compares what is of one thing."""

import json
from pathlib import Path

import pytest
from toys import SKIPS, TOYS, write

from fxpipe.bench import bench
from fxpipe.runtime.trace import timeline_of
from fxpipe.schedule import Schedule


def planned(folder: Path, toy=SKIPS, **settings) -> Path:
    """The toy's package, each action of which is predicted to take 1 ms after the one before."""
    write(folder, toy, **settings)
    table = Schedule.from_csv((folder / "schedule.csv").read_text())
    spans = [[(float(k), k + 1.0) for k in range(len(row))] for row in table.rows]
    plan = json.loads((folder / "plan.json").read_text())
    plan["estimate"]["timeline"] = timeline_of(table, spans)
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def named(found) -> dict[tuple[str, str], tuple[float | None, float | None]]:
    return {(f.of, f.name): (f.predicted, f.measured) for f in found.figures}


@pytest.mark.parametrize("name", TOYS)
def test_random_inputs_fit_any_package(tmp_path, name):
    found = bench(planned(tmp_path, TOYS[name]), steps=1)
    assert found.notes == ()
    predicted, measured = named(found)["stage 0", "forward"]
    assert predicted == 1.0
    assert measured > 0


def test_step_stages_kinds_and_devices_are_compared(tmp_path):
    found = bench(planned(tmp_path, schedule="split", checkpoint="always"), steps=2)
    keys = {of: [name for of_, name in named(found) if of_ == of] for of, _ in named(found)}
    assert keys["step"] == ["time", "bubble"]
    for j in range(4):
        assert keys[f"stage {j}"] == ["forward", "backward"]
        assert keys[f"device {j}"] == ["busy", "bubble", "peak memory"]
    halves = ["gradients of inputs", "gradients of weights"]
    assert keys["all stages"] == ["forward", *halves, "recomputation", "loss"]
    assert found.steps == 2
    assert all(measured is not None for _, measured in named(found).values())


def test_it_says_where_the_two_sides_are_not_of_one_thing(tmp_path, monkeypatch):
    folder = planned(tmp_path)
    rows = (folder / "schedule.csv").read_text().splitlines()
    cells = rows[0].split(",")
    rows[0] = ",".join([*cells[:-2], cells[-1], cells[-2]])
    (folder / "schedule.csv").write_text("\n".join(rows) + "\n")
    plan = json.loads((folder / "plan.json").read_text())
    plan["devices"] = ["cuda:6", "cuda:7", "cuda:8", "cuda:9"]
    (folder / "plan.json").write_text(json.dumps(plan))
    assert bench(folder, steps=1, devices="cpu*4").notes == (
        "ran on 4 CPU lanes, predicted for cuda:6, cuda:7, cuda:8, cuda:9",
        "schedule.csv was edited: what is predicted is the schedule that was compiled",
    )


def test_it_says_where_the_loss_is_not_the_one_that_was_planned(tmp_path):
    folder = planned(tmp_path)
    plan = json.loads((folder / "plan.json").read_text())
    plan["estimate"]["loss_ms"] = 0.25
    (folder / "plan.json").write_text(json.dumps(plan))
    found = bench(folder, steps=1)
    (note,) = found.notes
    assert note.startswith("the loss was a mean of the outputs, predicted is one of 0.25 ms")
    assert named(found)["all stages", "loss"][0] == 4 * 0.25
