"""The commands that show a package's step: what they write, and what they refuse."""

import json
from pathlib import Path

import pytest
import torch
from test_cli import MODEL, refused, run

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


def test_perfetto_gets_both_steps():
    run("timeline", "out", "-o", "seen.json", "--trace", "step.json")
    assert json.loads(Path("seen.json").read_text()) == json.loads(Path("step.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("out", "-o", "seen.gif"), "seen.gif must end in .svg, .png or .json"),
        ((".", "-o", "seen.svg"), "is no package of fxpipe"),
        (("out", "-o", "no/seen.svg"), "no/seen.svg"),
        (("out", "-o", "seen.svg", "--trace", "none.json"), "none.json"),
        (("out", "-o", "seen.svg", "--trace", "net.py"), "net.py is no trace of a step"),
    ],
)
def test_timeline_refuses_with_one_message(arguments, expected):
    assert expected in refused("timeline", *arguments)
