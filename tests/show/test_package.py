"""A package as `fxpipe inspect` shows it."""

import json
from dataclasses import replace
from textwrap import dedent

from plans import MANIFEST
from shown import shown

from fxpipe.edits import Edits
from fxpipe.runtime.manifest import SegmentSpec
from fxpipe.show.package import package_json, package_table


def test_package_fits_into_100_columns():
    assert shown(package_table(MANIFEST, Edits())) == dedent("""\
    Tied: 3 stages on 3 CPU lanes; batch 10 in 4 micro-batches of at most 3; schedule 1f1b

    stage  device  ops  parameters           forward  backward  peak memory
        0  0: cpu    3   1,048,576  4.0 MiB  1.23 ms   12.3 ms     3.00 GiB
        1  1: cpu    4           0      0 B  1.23 ms   12.3 ms      1.0 MiB
        2  2: cpu    5   1,048,576  4.0 MiB  1.23 ms   12.3 ms        100 B

    value  from  to  shape                    bytes
    x_0       0   1  float32[batch, 1024]  12.0 KiB
    x_0       0   2  float32[batch, 1024]  12.0 KiB  portal
    x_1       1   2  float32[batch, 1024]  12.0 KiB

    embed.weight is shared by stages 0, 2: its gradients are added up

    predicted step 123 ms, bubble 25%; solver dp, gap 1.0%
    times measured on a CPU, no loss; graph equal to the model in train and eval
    memory planned for sgd: gradients only
    forward, backward and bytes are of one micro-batch; peak memory is the device's over a step
    """)


def test_which_device_holds_a_stage_is_told_where_several_have_one_name():
    stages = tuple(replace(stage, device=(0, 1, 0)[j]) for j, stage in enumerate(MANIFEST.stages))
    manifest = replace(MANIFEST, stages=stages)
    told = shown(package_table(manifest, Edits())).splitlines()[3:6]
    assert [line.split()[1:3] for line in told] == [["0:", "cpu"], ["1:", "cpu"], ["0:", "cpu"]]
    facts = package_json(manifest, Edits())["stages"]
    assert [fact["device_number"] for fact in facts] == [0, 1, 0]


def test_a_step_that_waits_for_the_host_says_so():
    def told(captured_ms):
        estimate = replace(MANIFEST.estimate, captured_ms=captured_ms)
        lines = shown(package_table(replace(MANIFEST, estimate=estimate), Edits())).splitlines()
        return [line for line in lines if "host" in line]

    assert told(None) == told(MANIFEST.estimate.step_ms) == []
    assert told(100.0) == [
        "it waits for the host: as a CUDA graph, on one GPU, it would take 100 ms"
    ]


def test_files_that_were_changed_by_hand_are_named():
    found = Edits(edited=("stage_0.py", "stage_1.py"), added=("notes [draft].md",))
    last = shown(package_table(MANIFEST, found)).splitlines()[-1]
    assert last == "files: edited stage_0.py, stage_1.py; added notes [draft].md"
    assert package_json(MANIFEST, found)["files"]["edited"] == ("stage_0.py", "stage_1.py")


def test_what_stages_recompute_is_named():
    segments = (SegmentSpec("h.3", "h.5", 12), SegmentSpec("h.7", "h.7", 4))
    stages = (replace(MANIFEST.stages[0], segments=segments), *MANIFEST.stages[1:])
    manifest = replace(MANIFEST, stages=stages)
    told = shown(package_table(manifest, Edits())).splitlines()
    assert "stage 0 recomputes h.3-h.5, h.7" in told
    assert package_json(manifest, Edits())["stages"][0]["segments"] == ["h.3-h.5", "h.7"]


def test_package_json_holds_the_same():
    facts = json.loads(json.dumps(package_json(MANIFEST, Edits())))
    assert [stage["parameters"] for stage in facts["stages"]] == [2**20, 0, 2**20]
    portals = [(value["from"], value["to"], value["portal"]) for value in facts["values"]]
    assert portals == [(0, 1, False), (0, 2, True), (1, 2, False)]
    assert facts["values"][0]["bytes"] == 3 * 1024 * 4
    assert facts["shared_parameters"] == {"embed.weight": [0, 2]}
