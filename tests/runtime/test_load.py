"""A package that does not fit is refused with each broken rule; an edited one that fits runs."""

import json
import traceback

import pytest
import torch
from toys import CHAIN, SKIPS, both, write

from fxpipe.errors import DeviceError, InputError, PackageError, StageError
from fxpipe.runtime import load


def _edit(folder, file, old, new):
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))


def _plan(folder, change):
    plan = json.loads((folder / "plan.json").read_text())
    change(plan)
    (folder / "plan.json").write_text(json.dumps(plan))


BROKEN = {
    "a missing file": (
        lambda d: (d / "stage_1.py").unlink(),
        "stage_1.py is missing",
    ),
    "no schedule": (
        lambda d: (d / "schedule.csv").unlink(),
        "schedule.csv is missing\nput back what is missing",
    ),
    "a missing class": (
        lambda d: _edit(d, "stage_1.py", "class Stage1", "class Other"),
        "stage_1.py has no nn.Module class Stage1",
    ),
    "a syntax error": (
        lambda d: _edit(d, "stage_1.py", "return torch", "return = torch"),
        "stage_1.py, line 13 fails: SyntaxError",
    ),
    "a failing constructor": (
        lambda d: _edit(d, "stage_1.py", "nn.Linear(7, 7)", "nn.Linear('7', 7)"),
        "stage_1.py, line 10: `self.body = nn.ModuleDict({\"step\": nn.Linear('7', 7)})` fails: "
        "TypeError: ",
    ),
    "a failing import": (
        lambda d: _edit(d, "stage_1.py", "import torch\n", "import torch\ntorch.no_such\n"),
        "stage_1.py, line 2: `torch.no_such` fails: AttributeError: ",
    ),
    "a file that ends Python": (
        lambda d: _edit(d, "stage_1.py", "import torch\n", "import torch\nraise SystemExit\n"),
        "stage_1.py, line 2: `raise SystemExit` fails: SystemExit\n",
    ),
    "an error in another file": (
        lambda d: (
            (d / "blocks.py").write_text("act = =\n"),
            _edit(d, "stage_1.py", "import torch\n", "import torch\nfrom .blocks import act\n"),
        ),
        "stage_1.py, line 2: `from .blocks import act` fails: SyntaxError: invalid syntax "
        "(blocks.py, line 1)",
    ),
    "another parameter of forward": (
        lambda d: _edit(d, "stage_1.py", "self, h):", "self, other):"),
        "stage_1.py: forward takes (other), plan.json says (h)",
    ),
    "a parameter more and one less": (
        lambda d: _edit(d, "stage_0.py", "self.first =", "self.second ="),
        "stage_0.py holds parameter 'second.bias', plan.json does not list it",
    ),
    "another shape": (
        lambda d: _edit(d, "stage_0.py", "Linear(6, 7)", "Linear(6, 8)"),
        "parameter 'first.weight' has shape (8, 6), plan.json says (7, 6)",
    ),
    "a layer that is not trained": (
        lambda d: _edit(d, "stage_0.py", "Linear(6, 7)", "Linear(6, 7).requires_grad_(False)"),
        "stage_0.py: parameter 'first.bias' is not trained, plan.json says it is",
    ),
    "an unknown value": (
        lambda d: _plan(d, lambda p: p["stages"][1]["inputs"][0].update(value="z")),
        "stage 1 takes 'z' from stage 0, which makes no such value",
    ),
    "a later source": (
        lambda d: _plan(d, lambda p: p["stages"][1]["inputs"][0].update(source=2)),
        "stage 1 takes 'h' from stage 2, which does not run before it",
    ),
    "an output nobody makes": (
        lambda d: _plan(d, lambda p: p["outputs"][0].update(value="z")),
        "output 'z' is not made by stage 2",
    ),
    "another number of micro-batches": (
        lambda d: _plan(d, lambda p: p.update(microbatches=5)),
        "0F4 is missing",
    ),
    "an action too few": (
        lambda d: _edit(d, "schedule.csv", "1F0,", ""),
        "1F0 is missing",
    ),
    "a device that is not": (
        lambda d: _plan(d, lambda p: p["stages"][2].update(device=7)),
        "stage 2 is on device 7 of 3",
    ),
    "an unknown checkpoint mode": (
        lambda d: _plan(d, lambda p: p["stages"][2].update(checkpoint="often")),
        "checkpoint 'often'",
    ),
    "a tie to nothing": (
        lambda d: _plan(d, lambda p: p["state"][1].update(alias_of="z")),
        "'first.bias' is tied to 'z', which is not in state",
    ),
    "a schedule in another encoding": (
        lambda d: (d / "schedule.csv").write_text((d / "schedule.csv").read_text(), "utf-16"),
        "schedule.csv is no text in UTF-8 (invalid start byte at byte 0): save it as UTF-8",
    ),
    "a buffer of another shape": (
        lambda d: torch.save({"first.bias": torch.zeros(2)}, d / "buffers.pt"),
        "buffers.pt: 'first.bias' has shape (2,), plan.json says (7,)",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_broken_rule_is_named(tmp_path, case):
    damage, message = BROKEN[case]
    damage(write(tmp_path, CHAIN))
    with pytest.raises(PackageError) as error:
        load(tmp_path)
    assert message in str(error.value)
    assert "compile again" in str(error.value)


def test_all_broken_rules_are_told_at_once(tmp_path):
    write(tmp_path, CHAIN)
    for case in ("a missing file", "an action too few", "another shape"):
        BROKEN[case][0](tmp_path)
    with pytest.raises(PackageError) as error:
        load(tmp_path)
    for case in ("a missing file", "an action too few", "another shape"):
        assert BROKEN[case][1] in str(error.value)


def test_a_folder_that_is_no_package(tmp_path):
    with pytest.raises(PackageError, match=r"plan\.json can't be read"):
        load(tmp_path)


def test_a_plan_in_another_encoding(tmp_path):
    (tmp_path / "plan.json").write_text("{}", "utf-16")
    with pytest.raises(PackageError, match=r"plan\.json is no text in UTF-8"):
        load(tmp_path)


def test_a_link_that_leads_to_itself(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PackageError, match=r"loop is no package of fxpipe: its plan\.json can't"):
        load(tmp_path / "loop")


@pytest.mark.parametrize("other", [{}, None, "x", -1])
@pytest.mark.parametrize("field", ["stages", "devices", "outputs"])
def test_a_plan_with_something_else_in_the_place_of_a_list(tmp_path, field, other):
    _plan(write(tmp_path, CHAIN), lambda p: p.update({field: other}))
    with pytest.raises(PackageError, match=f"{field}: expected tuple, found"):
        load(tmp_path)


def test_a_plan_without_a_field_is_told_which(tmp_path):
    _plan(write(tmp_path, CHAIN), lambda p: p.pop("solver"))
    with pytest.raises(PackageError, match=r"missing fields \['solver'\]$"):
        load(tmp_path)


@pytest.mark.parametrize("other", ["float32x", "nn"])
def test_a_plan_with_a_dtype_that_torch_does_not_have(tmp_path, other):
    _plan(write(tmp_path, CHAIN), lambda p: p["state"][1]["spec"].update(dtype=other))
    with pytest.raises(PackageError, match=rf"state\[1\]: spec: '{other}': give a dtype of torch"):
        load(tmp_path)


def test_an_edited_stage_takes_effect_at_the_next_load(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    x = CHAIN.inputs()
    with torch.no_grad():
        before = pipe(*x)
        _edit(tmp_path, "stage_2.py", "return self.last(", "return 2 * self.last(")
        again = load(tmp_path)
        again.load_state_dict(pipe.state_dict())
        assert torch.equal(again(*x), 2 * before)
        assert torch.equal(pipe(*x), before)


def test_stage_files_may_share_a_module_of_the_package(tmp_path):
    write(tmp_path, CHAIN)
    (tmp_path / "blocks.py").write_text("import torch\n\n\ndef act(x):\n    return torch.relu(x)\n")
    _edit(tmp_path, "stage_1.py", "import torch\n", "import torch\nfrom .blocks import act\n")
    _edit(tmp_path, "stage_1.py", "torch.relu(", "act(")
    load(tmp_path)(*CHAIN.inputs())


def test_two_packages_do_not_mix(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    write(folders[0], CHAIN)
    write(folders[1], SKIPS)
    assert [len(load(folder).manifest.stages) for folder in folders] == [3, 4]


def test_as_many_devices_as_compiled_for(tmp_path):
    write(tmp_path, CHAIN)
    with pytest.raises(DeviceError, match="compiled for 3 devices, 2 were given"):
        load(tmp_path, "cpu*2")


def test_a_stage_that_returns_another_number_of_values(tmp_path):
    write(tmp_path, CHAIN)
    _edit(tmp_path, "stage_1.py", 'return torch.relu(self.body["step"](h))', "return h, h")
    with pytest.raises(StageError, match=r"stage_1\.py returned 2 values .* 1 tensors \(g\)"):
        load(tmp_path)(*CHAIN.inputs())


def test_tracebacks_show_the_stage_file(tmp_path):
    pipe = load(write(tmp_path, CHAIN))
    with pytest.raises(StageError) as error:
        pipe(torch.zeros(10, 6))
    text = "".join(traceback.format_exception(error.value))
    assert "stage_0.py" in text
    assert "return self.first(x)" in text


BAD_INPUTS = {
    "missing": ((), {}, "missing inputs: x"),
    "too many": ((0, 0), {}, "2 positional inputs were given, Chain's forward takes 1: x"),
    "twice": ((0,), {"x": 0}, "'x' was given twice"),
    "unknown": ((), {"z": 0}, "leave it out, or compile again with it, if the model takes it"),
    "no tensor": ((3,), {}, "['x'] must be a tensor"),
    "no rows": ((torch.zeros(0, 6),), {}, "a batch of 0 rows can't be cut into micro-batches"),
    "another shape": ((torch.zeros(8, 5),), {}, "'x' must have shape [batch, 6], found [8, 5]"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_inputs_that_do_not_fit_are_named(tmp_path, case):
    args, kwargs, message = BAD_INPUTS[case]
    pipe = load(write(tmp_path, CHAIN))
    with pytest.raises(InputError) as error:
        pipe(*args, **kwargs)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"outputs": "all"}, "outputs, dp, timeout_s and fully_shard are for distributed=True"),
        ({"timeout_s": 5.0}, "outputs, dp, timeout_s and fully_shard are for distributed=True"),
        ({"distributed": True, "capture": "graph"}, "^capture is for pipelines of one process"),
        ({"distributed": True, "without": ["streams"]}, "^without is for pipelines of one"),
    ],
)
def test_an_option_of_another_kind_of_pipeline_is_refused_by_its_name(tmp_path, options, says):
    with pytest.raises(InputError, match=says):
        load(write(tmp_path, CHAIN), **options)
