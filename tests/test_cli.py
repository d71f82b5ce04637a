"""The command: what it prints, and one clear message with exit code 2 for each bad input."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import MODEL, refused, run
from typer.testing import Result

import fxpipe
from fxpipe import target as targets
from fxpipe.runtime import load
from fxpipe.settings import usual_microbatches


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str = MODEL, name: str = "net.py") -> str:
    Path(name).write_text(text)
    return name


def compiled_into(out: str, *options: object) -> Result:
    result = run("compile", write(), "--devices", "cpu*2", "-o", out, *options)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of MODEL; copy it before changing it."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "net.py").write_text(MODEL)
    out = folder / "out"
    result = run("compile", folder / "net.py", "--devices", "cpu*2", "-o", out)
    assert result.exit_code == 0, result.output
    return out


def test_version_is_told():
    assert run("--version").output == f"fxpipe {fxpipe.__version__}\n"


def test_compile_shows_the_plan_and_inspect_the_same_again():
    result = compiled_into("out", "--verbose")
    for text in ("Net: 2 stages on 2 CPU lanes", "batch 8 in 4 micro-batches of 2", "1f1b"):
        assert text in result.stdout
    for name in ("capture", "profile", "linearize", "partition", "portals", "emit"):
        assert name in result.stderr
    assert "predicted step" in result.stdout
    assert "wrote out" in result.stderr
    assert run("inspect", "out").stdout == result.stdout


def test_a_warning_is_a_line_and_the_package_is_there():
    mixes = MODEL.replace("return self.", "return x.mean() + self.")
    result = run("compile", write(mixes), "--devices", "cpu*2", "-o", "out")
    warning = "warning: forward mixes rows of the batch, at net.py, line 17: return x.mean()"
    assert sum(line.startswith(warning) for line in result.stderr.splitlines()) == 1
    assert Path("out/plan.json").exists()


INTERRUPTED = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.linalg":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
runpy.run_module("fxpipe", run_name="__main__", alter_sys=True)
"""


def test_an_interrupt_while_torch_imports_numpy_ends_the_command():
    args = ["compile", write(), "--devices", "cpu*2", "-o", "out"]
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, *args], capture_output=True)
    assert ended.returncode == -signal.SIGINT  # which a shell gives as 130
    assert not Path("out").exists()


def test_json_is_one_object_and_all_there_is():
    result = compiled_into("out", "--json")
    facts = json.loads(result.stdout)
    assert [stage["device"] for stage in facts["stages"]] == ["cpu", "cpu"]
    assert sum(stage["parameters"] for stage in facts["stages"]) == 40 + 16 + 72 + 18
    assert {value["from"] for value in facts["values"]} == {0}
    assert json.loads(run("inspect", "out", "--json").stdout) == facts


def test_json_has_a_place_to_go_to():
    closed = f"{sys.executable} -m fxpipe inspect out --json >&-"
    ended = subprocess.run(closed, shell=True, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "standard output is closed" in ended.stderr


def test_count_of_devices_says_what_it_came_to():
    result = run("compile", write(), "--devices", 2, "-o", "out")
    assert "devices: 2 " in result.stderr


def test_saved_profile_gives_the_same_package_again():
    compiled_into("one", "--save-profile", "profile.json")
    compiled_into("two", "--profile", "profile.json")
    assert files("one") == files("two")


def test_verify_says_equal(package):
    result = run("verify", package, package.parent / "net.py")
    assert result.exit_code == 0, result.output
    assert "equal" in result.stdout
    facts = json.loads(run("verify", package, package.parent / "net.py", "--json").stdout)
    assert facts["equal"] is True
    assert "step(): gradients" in {group["group"] for group in facts["differences"]}


def test_verify_says_differs_with_exit_code_1(package):
    shutil.copytree(package, "edited")
    for stage in Path("edited").glob("stage_*.py"):  # a comment may name what another stage does
        stage.write_text(stage.read_text().replace("relu", "gelu"))
    result = run("verify", "edited", package.parent / "net.py")
    assert result.exit_code == 1, result.output
    assert "differs" in result.stdout
    assert "files: edited stage_" in result.stdout
    facts = json.loads(run("verify", "edited", package.parent / "net.py", "--json").stdout)
    assert facts["files"]["edited"]


def test_verify_runs_where_it_is_told_to(package):
    target = package.parent / "net.py"
    result = run("verify", package, target, "--devices", "cpu,cpu")
    assert result.exit_code == 0, result.output
    assert "cuda:9" in refused("verify", package, target, "--devices", "cuda:9,cuda:9")


def test_verify_of_a_model_that_one_device_can_not_hold_says_what_to_do(package):
    """As an allocator tells, when the model comes to its device or when it runs there."""
    none_left = 'raise torch.OutOfMemoryError("CUDA out of memory")'
    runs = MODEL.replace("        y = ", f"        {none_left}\n        y = ")
    comes = MODEL.replace(
        "    def forward", f"    def to(self, device):\n        {none_left}\n\n    def forward"
    )
    for text in (runs, comes):
        message = refused("verify", package, write(text))
        assert "more memory than cpu has" in message
        assert "--devices" in message


def test_verify_of_a_model_that_float64_does_not_suit_says_what_does(package):
    single = MODEL.replace("        y = ", "        x = x.float()\n        y = ")
    message = refused("verify", package, write(single))
    assert "forward of Net in float64, or the loss, raised RuntimeError" in message
    assert "verify with --dtype float32" in message


def test_inspect_names_files_that_were_edited_and_compile_keeps_them():
    compiled_into("out")
    stage = Path("out/stage_1.py")
    stage.write_text(stage.read_text().replace("relu", "gelu") + "# mine\n")
    assert "files: edited stage_1.py" in run("inspect", "out").stdout
    facts = json.loads(run("inspect", "out", "--json").stdout)
    assert facts["files"] == {"edited": ["stage_1.py"], "missing": [], "added": []}
    before = files("out")
    assert "stage_1.py" in refused("compile", write(), "--devices", 2, "-o", "out")
    assert files("out") == before


def test_compiled_with_weights_and_runtime_it_verifies_and_equals_the_model():
    compiled_into("out", "--weights", "--standalone")
    assert Path("out/weights/stage_1.safetensors").is_file()
    assert Path("out/_fxpipe/runtime/pipeline.py").is_file()
    result = run("verify", "out", "net.py")
    assert result.exit_code == 0, result.output
    model, pipe = targets.load("net.py").build().eval(), load("out").eval()
    x = torch.randn(8, 4)
    torch.testing.assert_close(pipe(x), model(x))
    compiled_into("out")
    assert sorted(path.name for path in Path("out").iterdir() if path.is_dir()) == []


def test_target_without_build():
    message = refused("compile", write("x = 1"), "--devices", 2, "-o", "out")
    assert "net.py defines no `build`" in message
    assert not Path("out").exists()


def test_target_that_is_not_there():
    assert "no file absent.py" in refused("compile", "absent.py", "--devices", 2, "-o", "out")


def test_inputs_that_do_not_fit_the_model():
    target = write(MODEL.replace("torch.randn(batch, 4)", "torch.randn(batch, 5)"))
    message = refused("compile", target, "--devices", 2, "-o", "out")
    assert "net.py" in message
    assert "line 15" in message
    assert not Path("out").exists()


def test_arguments_that_forward_does_not_take():
    target = write(MODEL.replace("(torch.randn(batch, 4),)", "{'y': torch.randn(batch, 4)}"))
    message = refused("compile", target, "--devices", 2, "-o", "out")
    assert "forward(x)" in message


def test_other_rows_than_the_batch_are_refused_by_all_commands(package):
    target = write(MODEL.replace("randn(batch, 4)", "randn(batch // 2, 4)"))
    measured = ("--devices", "cpu*2", "-o", "out")
    for command in (
        ("compile", target, *measured),
        ("profile", target, *measured),
        ("plan", target, "--devices", "cpu*2"),
        ("verify", package, target),
        ("bench", package, target),
    ):
        assert "inputs(8) in net.py returned 4 rows" in refused(*command)
    assert not Path("out").exists()


def test_branch_on_data_names_the_line():
    target = write(MODEL.replace("z = F.relu(self", "z = y if y.sum() > 0 else F.relu(self"))
    message = refused("compile", target, "--devices", 2, "-o", "out")
    assert "net.py" in message
    assert "line 16" in message
    assert not Path("out").exists()


def test_more_devices_than_blocks_are_told_before_costs_are_measured():
    many = write(), "--devices", "cpu*64", "--batch", 256
    with (
        mock.patch("fxpipe.compiler.priced", side_effect=AssertionError),
        mock.patch("fxpipe.costing.priced", side_effect=AssertionError),
    ):
        for command in (
            ("compile", *many, "-o", "out"),
            ("profile", *many, "-o", "out"),
            ("plan", *many),
        ):
            assert "64 stages, but the model has only 7 blocks" in refused(*command)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--microbatches", 10**8), "a batch of 8 can't be cut into 100000000 micro-batches"),
        (("--microbatches", 10**7, "--batch", 10**7), "40000000 actions; plans have 16777216"),
        (("--schedule", "many.csv"), "a batch of 8 can't be cut into 100000000 micro-batches"),
        (("--schedule", "stages.csv"), "200000000 actions; plans have 16777216 at most"),
        (("--schedule", "empty.csv"), "empty.csv is empty: write a row for each device"),
        (("--devices", "9" * 20), "more than 4096 devices"),
        (("--time-limit", "inf"), "the time limit is 0 to 1000000 seconds, not inf"),
    ],
)
def test_numbers_beyond_all_reason_are_refused_before_the_work(options, says):
    Path("many.csv").write_text("0F99999999,0B0")
    Path("stages.csv").write_text("99999999F0,0B0")
    Path("empty.csv").touch()
    with mock.patch("fxpipe.compiler.capture_model", side_effect=AssertionError):
        assert says in refused("compile", write(), "--devices", 2, "-o", "out", *options)


@pytest.mark.parametrize(
    ("n_devices", "batch", "expected"),
    [(2, 8, 4), (3, 8, 4), (3, 13, 6), (3, 5, 5), (4, 8, 8), (4, 11, 5), (5, 3, 3), (3, None, 6)],
)
def test_no_micro_batch_has_one_row_while_others_have_two(n_devices, batch, expected):
    assert usual_microbatches(n_devices, batch) == expected


def test_fewer_rows_than_microbatches():
    options = ("--devices", 2, "--batch", 2, "--microbatches", 4)
    message = refused("compile", write(), *options, "-o", "out")
    assert "2" in message
    assert "4" in message


@pytest.mark.parametrize("devices", ["0", "gpu:0", "cuda:99", "", "cpu*0"])
def test_devices_that_are_not_there(devices):
    refused("compile", write(), "--devices", devices, "-o", "out")


def test_folder_that_is_not_ours_is_left_alone():
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("years of work")
    with mock.patch("fxpipe.compiler.capture_model", side_effect=AssertionError):
        assert "out" in refused("compile", write(), "--devices", 2, "-o", "out")
    assert files("out") == {"thesis.tex": "years of work"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-o", "afile/out"), "afile/out can't be written: "),
        (("-o", "link"), "link is a link to afolder, and would be replaced"),
        (("-o", "out", "--save-profile", "afolder"), "afolder can't be written: it is a folder"),
        (("-o", "out", "--save-profile", "afile/costs"), "afile/costs can't be written: "),
        (("-o", "out", "--save-profile", "out/costs"), "out/costs lies in the package out"),
    ],
)
def test_what_can_not_be_written_is_told_before_the_work(options, says):
    Path("afile").touch()
    Path("afolder").mkdir()
    Path("link").symlink_to("afolder")
    with mock.patch("fxpipe.compiler.capture_model", side_effect=AssertionError):
        assert says in refused("compile", write(), "--devices", 2, *options)
    with mock.patch("fxpipe.costing.capture_model", side_effect=AssertionError):
        command = ("profile", write(), "--devices", 2, "-o", "afolder")
        assert "afolder can't be written: it is a folder" in refused(*command)


def test_our_folder_is_replaced_whole():
    compiled_into("out", "--devices", "cpu*3")
    assert "stage_2.py" in files("out")
    compiled_into("out")
    assert "stage_2.py" not in files("out")
    assert {path.name for path in Path().iterdir()} == {"net.py", "out"}


def test_what_was_put_into_our_folder_is_not_lost():
    compiled_into("out")
    Path("out/weights.pt").write_text("years of training")
    before = files("out")
    assert "weights.pt" in refused("compile", write(), "--devices", 2, "-o", "out")
    assert files("out") == before


def test_failed_compile_leaves_the_package_before():
    compiled_into("out")
    before = files("out")
    refused("compile", write(), "--devices", "cpu*64", "--batch", 256, "-o", "out")
    assert files("out") == before


@pytest.mark.parametrize("command", [("inspect",), ("verify", "net.py")])
def test_folder_that_is_no_package(command):
    name, *target = command
    write()
    assert "nowhere" in refused(name, "nowhere", *target)


def test_edited_plan_that_no_longer_fits_its_stages(package):
    shutil.copytree(package, "edited")
    plan = Path("edited/plan.json")
    data = json.loads(plan.read_text())
    data["stages"][1]["inputs"][0]["parameter"] = "something_else"
    plan.write_text(json.dumps(data))
    message = refused("verify", "edited", package.parent / "net.py")
    assert "something_else" in message


def lacks_a_stage(out: Path) -> None:
    (out / "stage_1.py").unlink()
    (out / "notes.md").touch()


@pytest.mark.parametrize(
    ("edit", "ends"),
    [
        (
            lacks_a_stage,
            "put back what is missing, or compile again\nfiles: missing stage_1.py; added notes.md",
        ),
        (
            lambda out: (out / "schedule.csv").write_text("0F0,0B0"),
            "mend schedule.csv, or compile again\nfiles: edited schedule.csv",
        ),
        (lambda out: (out / "plan.json").write_text("{}"), "none that fxpipe compile wrote"),
    ],
)
def test_of_files_that_do_not_fit_the_edited_ones_are_named_with_the_way_out(package, edit, ends):
    shutil.copytree(package, "edited")
    edit(Path("edited"))
    for command in (("inspect", "edited"), ("verify", "edited", package.parent / "net.py")):
        assert refused(*command).rstrip().endswith(ends)


def test_stages_are_moved_by_compiling_with_a_table_that_has_them_elsewhere(package):
    shutil.copytree(package, "edited")
    table = Path("edited/schedule.csv")
    table.write_text("\n".join(reversed(table.read_text().splitlines())))
    way_out = refused("inspect", "edited").splitlines()[-2]
    assert way_out == (
        "mend schedule.csv, move stages by compiling with such a table into another folder "
        "(--schedule FILE.csv), or compile again"
    )
    compiled_into("moved", "--schedule", table, "--profile", "analytic:cpu")
    plan = json.loads(Path("moved/plan.json").read_text())
    assert [stage["device"] for stage in plan["stages"]] == [1, 0]


@pytest.mark.parametrize("device", [None, 7])
def test_edited_plan_that_does_not_fit_itself(package, device):
    shutil.copytree(package, "edited")
    plan = Path("edited/plan.json")
    data = json.loads(plan.read_text())
    data["stages"][0]["device"] = device
    plan.write_text(json.dumps(data))
    assert "device" in refused("inspect", "edited")
    assert "device" in refused("verify", "edited", package.parent / "net.py")


def test_weights_of_another_model(package):
    other = write(MODEL.replace("self.second", "self.middle"), "other.py")
    message = refused("verify", package, other)
    assert "second.weight" in message
    assert "middle.weight" in message


def test_profile_of_another_model():
    compiled_into("out", "--save-profile", "profile.json")
    other = write(MODEL.replace("nn.Linear(8, 2)", "nn.Linear(8, 3)"), "other.py")
    options = ("--devices", 2, "--profile", "profile.json", "-o", "other")
    assert "profile" in refused("compile", other, *options)
    assert not Path("other").exists()
    Path("profile.json").write_text("{")
    assert "profile.json" in refused("compile", other, *options)


def test_analytic_costs_build_without_memory_and_say_so():
    done = compiled_into("out", "--profile", "analytic:h100")
    assert done.exit_code == 0, done.output
    assert "building without memory" in done.stderr
    assert (
        "times analytic:h100, no loss; graph equal to the model in train and eval, by"
        in done.stdout
    )
    assert run("verify", "out", "net.py").exit_code == 0


def test_weights_of_a_model_without_memory_are_refused_before_the_work():
    options = ("--devices", "2", "-o", "out", "--profile", "analytic:h100", "--weights")
    with mock.patch("fxpipe.compiler.compile", side_effect=AssertionError):
        message = refused("compile", write(), *options)
    assert "no values to write: leave --weights out" in message
    assert not Path("out").exists()


def test_analytic_profile_of_an_unknown_device():
    message = refused(
        "compile", write(), "--devices", "2", "-o", "out", "--profile", "analytic:abacus"
    )
    assert "no analytic profile 'analytic:abacus'" in message
    assert "analytic:h100" in message


def test_saved_analytic_profile_gives_the_same_package_again():
    compiled_into("one", "--profile", "analytic:a100", "--save-profile", "costs.json")
    compiled_into("two", "--profile", "costs.json")
    assert files("one") == files("two")


def test_a_table_of_ones_own_is_the_packages():
    compiled_into("usual", "--microbatches", 3, "--schedule", "zb-v")
    table = Path("usual/schedule.csv").read_text()
    Path("mine.csv").write_text(table)
    compiled_into("own", "--schedule", "mine.csv")  # micro-batches are the table's
    assert Path("own/schedule.csv").read_text() == table
    assert run("verify", "own", "net.py").exit_code == 0


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (None, "the schedule mine.csv can't be read: No such file or directory"),
        ("0F0;0B0", "mine.csv: schedule cell '0F0;0B0' is no action"),
        ("0F0,0B0\n1B0,1F0\n", "device 1 waits forever at 1B0 for 1F0"),
        ("0F0,0B0\n", "rows: 1, devices: 2"),
    ],
)
def test_a_table_that_is_none_is_refused_before_the_work(table, says):
    if table is not None:
        Path("mine.csv").write_text(table)
    with mock.patch("fxpipe.compiler.capture_model", side_effect=AssertionError):
        options = ("--devices", "cpu*2", "-o", "out", "--schedule", "mine.csv")
        assert says in refused("compile", write(), *options)


def test_wrong_use_is_told_by_the_parser():
    assert run("compile", write(), "-o", "out").exit_code == 2
    options = ("--devices", 2, "-o", "out")
    assert run("compile", write(), *options, "--schedule", "fast").exit_code == 2
    assert run("compile", write(), *options, "--batch", 0).exit_code == 2


def files(folder: str) -> dict[str, str]:
    found = (path for path in Path(folder).rglob("*") if "__pycache__" not in path.parts)
    return {path.name: path.read_text() for path in found if path.is_file()}


def test_a_profile_is_measured_on_its_own_and_compiled_from():
    done = run("profile", write(), "--devices", 2, "-o", "costs.json", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["forward_ms"] > 0
    assert facts["links"][0]["gb_per_s"] is None
    compiled_into("out", "--profile", "costs.json")
    by_itself = run("profile", write(), "-o", "all.json")
    assert by_itself.exit_code == 0, by_itself.output
    compiled_into("another", "--profile", "all.json")
    table = run("profile", write(), "--devices", 2, "-o", "a100.json", "--profile", "analytic:a100")
    assert "300.0 GB/s" in table.stdout
    compiled_into("other", "--profile", "a100.json")


def test_a_profile_that_lacks_an_op():
    done = run("profile", write(), "--devices", 2, "-o", "costs.json")
    assert done.exit_code == 0, done.output
    data = json.loads(Path("costs.json").read_text())
    gone = sorted(data["costs"])[0]
    del data["costs"][gone]
    Path("costs.json").write_text(json.dumps(data))
    options = ("--devices", 2, "--profile", "costs.json", "-o", "other")
    assert f"the profile has no cost of {gone}" in refused("compile", write(), *options)


def test_optimizer_memory_and_topology():
    options = ("--optimizer", "adamw", "--memory", "1GiB,2GiB", "--topology", "2:nvlink4")
    result = compiled_into("out", *options)
    assert "memory planned for adamw: gradients, 2 states" in result.stdout
    facts = json.loads(run("inspect", "out", "--json").stdout)
    assert facts["optimizer"] == {"text": "adamw: gradients, 2 states", "factor": 3.0}
    plain = json.loads(compiled_into("plain", "--json").stdout)
    held, other = (sum(s["peak_bytes"] for s in found["stages"]) for found in (facts, plain))
    states = 2 * sum(stage["parameter_bytes"] for stage in facts["stages"])
    assert held == pytest.approx(other + states, rel=0.3)


@pytest.mark.parametrize(
    ("option", "text", "says"),
    [
        ("--optimizer", "lion", "there is no optimizer 'lion'"),
        ("--memory", "0GiB", "a device with 0GiB of memory holds nothing"),
        ("--memory", "100B", "no partition fits"),
        ("--topology", "4x8:nvlink4/ib400", "has 32 devices, but --devices has 2"),
        ("--topology", "2:rope", "there is no link 'rope'"),
    ],
)
def test_wrong_optimizer_memory_or_topology(option, text, says):
    arguments = ("--devices", "cpu*2", "-o", "out", "--profile", "analytic:cpu", option, text)
    assert says in refused("compile", write(), *arguments)


LOSS = """

def targets(batch):
    return torch.zeros(batch, 2)


def loss(output, target):
    return F.mse_loss(output, target)
"""


def test_the_loss_of_a_target_is_planned_for():
    def facts_of(command: str, *options: object) -> dict[str, Any]:
        target = write(MODEL + LOSS)
        return json.loads(run(command, target, "--devices", 2, *options, "--json").stdout)

    worked_out = "--profile", "analytic:h100"
    loss_ms = facts_of("compile", *worked_out, "-o", "out")["loss_ms"]
    assert 0 < loss_ms < 1
    assert "times analytic:h100, loss 0." in run("inspect", "out").stdout
    assert facts_of("profile", *worked_out, "-o", "costs.json")["loss_ms"] == loss_ms
    assert facts_of("compile", "--profile", "costs.json", "-o", "out")["loss_ms"] == loss_ms
    with_loss = facts_of("plan", *worked_out, "--schedule", "1f1b")["step_ms"]
    write(MODEL)
    without = json.loads(
        run("plan", "net.py", "--devices", 2, *worked_out, "--schedule", "1f1b", "--json").stdout
    )
    assert with_loss > without["step_ms"]


def test_plan_takes_the_number_of_micro_batches_whose_step_is_shortest():
    def facts_of(count: object) -> dict[str, Any]:
        options = "--devices", 2, "--batch", 16, "--profile", "analytic:h100", "--schedule", "1f1b"
        return json.loads(run("plan", write(), *options, "--microbatches", count, "--json").stdout)

    facts = facts_of("auto")
    steps_ms = {count: facts_of(count)["step_ms"] for count in (2, 4, 8)}
    assert facts["step_ms"] == min(steps_ms.values()) == steps_ms[facts["microbatches"]]
    others = steps_ms.keys() - {facts["microbatches"]}
    beside = {f"1f1b in {count} micro-batches" for count in others}
    assert {one["name"] for one in facts["candidates"]} == beside
    run("profile", "net.py", "--devices", 2, "--profile", "analytic:h100", "-o", "costs.json")
    measured = "--devices", 2, "--profile", "costs.json", "--microbatches", "auto"
    assert "give no profile, or analytic:h100" in refused("plan", "net.py", *measured)


def test_a_loss_that_fails_is_told_before_anything_is_written():
    target = write(MODEL + LOSS.replace("F.mse_loss(output, target)", "target[0, 0, 0]"))
    says = refused("compile", target, "--devices", 2, "-o", "out")
    assert "loss_fn failed on micro-batch 0: IndexError" in says
    assert not Path("out").exists()
