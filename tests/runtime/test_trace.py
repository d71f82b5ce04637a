"""A trace has a row per lane of what was done, in order, beside what was predicted."""

import json
from itertools import pairwise

import pytest
import torch
from toys import MODES, SCHEDULES, SKIPS, TOYS, both, mean_loss

from fxpipe.errors import InputError
from fxpipe.runtime import package
from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.runtime.trace import Event, memory_of, predicted, timeline_of, write
from fxpipe.schedule import Schedule


def traced(pipe, toy, path):
    with pipe.trace(path):
        pipe.step(*toy.inputs(), loss_fn=mean_loss)
    return json.loads(path.read_text())["traceEvents"]


def named(events, process, kinds):
    """Names by row, in order of time, of the events of these kinds."""
    found = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] == process and event["cat"] in kinds:
            found.setdefault(event["tid"], []).append(event["name"])
    return [found[row] for row in sorted(found)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_lanes_row_has_its_actions_in_the_tables_order(tmp_path, schedule):
    _, pipe = both(tmp_path, SKIPS, schedule=schedule)
    events = traced(pipe, SKIPS, tmp_path / "step.json")
    table = (tmp_path / "schedule.csv").read_text().splitlines()
    assert named(events, 0, "FBIW") == [row.split(",") for row in table]


def test_actions_of_a_lane_do_not_overlap_and_what_is_inside_one_is_within_it(tmp_path):
    _, pipe = both(tmp_path, SKIPS, checkpoint="always")
    events = [e for e in traced(pipe, SKIPS, tmp_path / "step.json") if e["ph"] == "X"]
    for row in {event["tid"] for event in events}:
        actions = [e for e in events if e["tid"] == row and e["cat"] in "FB"]
        for one, following in pairwise(actions):
            assert one["ts"] + one["dur"] <= following["ts"]
        for inner in (e for e in events if e["tid"] == row and e["cat"] not in "FB"):
            assert any(
                a["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= a["ts"] + a["dur"]
                for a in actions
            )


@pytest.mark.parametrize("mode", MODES)
def test_recomputation_and_loss_are_shown(tmp_path, mode):
    _, pipe = both(tmp_path, SKIPS, checkpoint=mode)
    events = traced(pipe, SKIPS, tmp_path / "step.json")
    again = {"never": 0, "except_last": 3, "always": 4, "segment": 4}[mode]
    assert [len(row) for row in named(events, 0, ["recompute"])] == [again] * (4 if again else 0)
    assert sorted(named(events, 0, ["loss"])[0]) == [f"loss {i}" for i in range(4)]


def test_an_action_begins_when_what_it_needs_has_come(tmp_path):
    _, pipe = both(tmp_path, SKIPS, schedule="1f1b")
    spans = {
        e["name"]: (e["ts"], e["ts"] + e["dur"])
        for e in traced(pipe, SKIPS, tmp_path / "step.json")
        if e["ph"] == "X" and e["cat"] == "F"
    }
    # Lanes of one machine have one clock.
    for i in range(4):
        for j in range(3):
            assert spans[f"{j}F{i}"][0] < spans[f"{j + 1}F{i}"][0]


def test_copies_have_rows_of_their_own(tmp_path, monkeypatch):
    def parse_devices(devices):
        return tuple(torch.device("cpu", index) for index in range(len(devices)))

    monkeypatch.setattr(package, "parse_devices", parse_devices)
    _, pipe = both(tmp_path, SKIPS)
    events = traced(pipe, SKIPS, tmp_path / "step.json")
    assert all(row for row in named(events, 0, ["copy"]))
    rows = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert rows == [name for j in range(4) for name in (f"{j}: cpu:{j}", f"{j}: cpu:{j} copies")]


def test_the_prediction_stands_beside(tmp_path):
    schedule = Schedule.from_csv("0F0,0B0\n1F0,1B0\n")
    spans = [[(0.0, 1.0), (3.25, 4.5)], [(1.0, 2.0), (2.0, 3.25)]]
    timeline = timeline_of(schedule, spans)
    assert timeline == ("0F0 0.000 1.000, 0B0 3.250 4.500", "1F0 1.000 2.000, 1B0 2.000 3.250")
    memory = memory_of([[(0.0, 8), (0.5, 8), (1.0, 24)], [(1.0, 16)]])
    assert memory == ("0.000 8;1.000 24", "1.000 16")
    estimate = EstimateSpec(4.5, 0.0, (24, 16), timeline, memory, ("0F0", "1B0"))
    lanes = {0: "cpu", 1: "cpu"}
    write(tmp_path / "t.json", lanes, estimate, [Event(0, "0F0", "F", 0.5, 1.5)])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert named(events, 0, "FB") == [["0F0"]]
    assert named(events, 1, "FB") == [["0F0", "0B0"], ["1F0", "1B0"], ["0F0", "1B0"]]
    held = [(e["name"], e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    first, second = "0: cpu memory", "1: cpu memory"
    assert held == [(first, 0.0, 8), (first, 1000.0, 24), (second, 1000.0, 16)]
    (measured,) = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert (measured["ts"], measured["dur"]) == (500.0, 1000.0)
    assert predicted(["", "0F1 0.000 2.000"]) == [Event(1, "0F1", "F", 0.0, 2.0)]


def test_no_other_file_is_overwritten(tmp_path):
    _, pipe = both(tmp_path, SKIPS)
    plan = (tmp_path / "plan.json").read_text()
    refused = pytest.raises(InputError, match=r"plan.json is there already, and is no trace")
    with refused, pipe.trace(tmp_path / "plan.json"):
        pipe.step(*SKIPS.inputs(), loss_fn=mean_loss)
    assert (tmp_path / "plan.json").read_text() == plan
    for _ in range(2):
        with pipe.trace(tmp_path / "step.json"):
            pipe.step(*SKIPS.inputs(), loss_fn=mean_loss)


def test_the_last_step_counts_and_one_must_run(tmp_path):
    _, pipe = both(tmp_path, SKIPS)
    with pytest.raises(InputError, match="no step ran"), pipe.trace(tmp_path / "none.json"):
        pipe(*SKIPS.inputs())
    assert not (tmp_path / "none.json").exists()
    for place, why in (("nowhere/none.json", r"no folder .*nowhere"), ("", "it is a folder")):
        with pytest.raises(InputError, match=why), pipe.trace(tmp_path / place):
            raise AssertionError("said before any step")
    with pipe.trace(tmp_path / "two.json"):
        for _ in range(2):
            pipe.step(*SKIPS.inputs(), loss_fn=mean_loss)
    events = json.loads((tmp_path / "two.json").read_text())["traceEvents"]
    assert [len(row) for row in named(events, 0, "FB")] == [8] * 4


@pytest.mark.parametrize("name", TOYS)
def test_a_traced_step_is_an_ordinary_one(tmp_path, name):
    toy = TOYS[name]
    _, pipe = both(tmp_path, toy, checkpoint="except_last")
    torch.manual_seed(3)
    loss = pipe.step(*toy.inputs(), loss_fn=mean_loss)
    _, pipe = both(tmp_path, toy, checkpoint="except_last")
    torch.manual_seed(3)
    with pipe.trace(tmp_path / "step.json"):
        assert torch.equal(pipe.step(*toy.inputs(), loss_fn=mean_loss), loss)
