"""The commands that show a package's step: what they write, and what they refuse."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import MODEL, refused, run

import fxpipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, its package `out`, and `step.json`, a trace of that."""
    folder = tmp_path_factory.mktemp("views")
    (folder / "net.py").write_text(MODEL)
    result = run("compile", folder / "net.py", "--devices", "cpu*2", "-o", folder / "out")
    assert result.exit_code == 0, result.output
    pipe = fxpipe.load(folder / "out")
    with pipe.trace(folder / "step.json"):
        pipe.step(torch.randn(8, 4), loss_fn=lambda output, _: output.mean())
    return folder


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("options", [(), ("--trace", "step.json")])
@pytest.mark.parametrize("suffix", ["svg", "png", "json"])
def test_timeline_draws_what_the_suffix_says(suffix, options):
    result = run("timeline", "out", "-o", f"seen.{suffix}", *options)
    assert result.exit_code == 0, result.output
    assert result.stderr == f"wrote seen.{suffix}\n"
    written = Path(f"seen.{suffix}").read_bytes()
    beginning = {"svg": b"<?xml", "png": b"\x89PNG", "json": b"{"}[suffix]
    assert written.startswith(beginning)


@pytest.mark.parametrize("options", [(), ("--trace", "step.json")])
@pytest.mark.parametrize("name", ["schedule.csv", "stage_1.py"])
def test_what_is_shown_of_an_edited_package_says_that_it_was_compiled_before(
    tmp_path, name, options
):
    out = tmp_path / "out"
    shutil.copytree("out", out)
    (out / name).write_text((out / name).read_text() + "\n")
    (out / "notes.md").touch()
    seen, page = tmp_path / "seen.svg", tmp_path / "report.html"
    result = run("timeline", out, "-o", seen, *options)
    assert result.stderr.splitlines() == [
        f"wrote {seen}",
        f"files: edited {name}; what is predicted is the step that was compiled",
    ]
    run("report", out, "-o", page, *options)
    for file in (seen, page):
        assert "predicted as compiled, before edits: " in file.read_text()


def test_perfetto_gets_both_steps():
    run("timeline", "out", "-o", "seen.json", "--trace", "step.json")
    assert json.loads(Path("seen.json").read_text()) == json.loads(Path("step.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("out", "-o", "seen.gif"), "seen.gif must end in .svg, .png or .json"),
        ((".", "-o", "seen.svg"), "is no package of fxpipe"),
        (("out", "-o", "out/plan.json"), "out/plan.json is there already, and is no trace"),
        (("out", "-o", "net.py/seen.svg"), "net.py/seen.svg can't be written"),
        (("out", "-o", "seen.svg", "--trace", "none.json"), "none.json"),
        (("out", "-o", "seen.svg", "--trace", "net.py"), "net.py is no trace of a step"),
        (("out", "-o", "seen.svg", "--trace", "none.json"), "none.json is no trace of a step"),
    ],
)
def test_timeline_refuses_with_one_message(arguments, expected):
    assert expected in refused("timeline", *arguments)


@pytest.mark.parametrize("target", [(), ("net.py",)])
def test_bench_compares_a_steps_figures(target):
    result = run("bench", "out", *target, "--steps", 1, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["steps"], facts["notes"]) == (1, [])
    figures = {(f["of"], f["name"]): f for f in facts["figures"]}
    assert figures["device 1", "peak memory"]["measured"] > 0
    assert "measured" in run("bench", "out", "--steps", 1).stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((".",), "is no package of fxpipe"),
        (("out", "none.py"), "there is no file none.py"),
        (("out", "--devices", "cpu*3"), "compiled for 2 devices, 3 were given"),
    ],
)
def test_bench_refuses_with_one_message(arguments, expected):
    assert expected in refused("bench", *arguments)


def test_a_bench_of_a_part_takes_no_target(tmp_path):
    shutil.copytree("out", tmp_path / "out")
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    between = {"tensor": 0}
    part = {"modules": ["a"], "argument": "x", "between": between, "share": 1, "broken_by": ""}
    (tmp_path / "out/plan.json").write_text(json.dumps({**plan, "part": part}))
    assert "leave TARGET out" in refused("bench", tmp_path / "out", "net.py")
    assert run("bench", tmp_path / "out", "--steps", 1).exit_code == 0


@pytest.mark.parametrize("options", [(), ("--trace", "step.json")])
def test_report_is_a_page(options):
    result = run("report", "out", "-o", "report.html", *options)
    assert result.exit_code == 0, result.output
    text = Path("report.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert ("measured: " in text) == bool(options)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("out", "-o", "report.pdf"), "report.pdf must end in .html"),
        ((".", "-o", "report.html"), "is no package of fxpipe"),
        (("out", "-o", "net.py/report.html"), "net.py/report.html can't be written"),
        (("out", "-o", "report.html", "--trace", "net.py"), "net.py is no trace of a step"),
    ],
)
def test_report_refuses_with_one_message(arguments, expected):
    assert expected in refused("report", *arguments)
