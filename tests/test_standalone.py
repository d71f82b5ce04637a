"""A standalone package runs where only torch is installed, and computes the same there."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys

import models
import pytest
import torch
from flat import compile_flat
from ruff import find_ruff_bin
from safetensors.torch import load_file

import fxpipe
from fxpipe.edits import Edits, edits


@pytest.fixture(scope="module")
def package():
    return compile_flat(models.Norms(), (torch.ones(4, 3, 8, 8),), devices="cpu*2", microbatches=2)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of packages with torch, what torch requires, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    wanted, found = ["torch"], set()
    while wanted:
        name = wanted.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # wanted on other systems
        found.add(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))
        required = [text for text in distribution.requires or () if "extra ==" not in text]
        names = {re.match(r"[\w.-]+", text)[0] for text in required}
        wanted += names - found
    return folder


def test_it_runs_and_trains_with_torch_alone(package, site, tmp_path):
    """Also inside another package and under another name, and with errors of its own."""
    (tmp_path / "tree").mkdir()
    package.write(tmp_path / "out", standalone=True).rename(tmp_path / "tree/small")
    model = models.Norms().eval()
    x = torch.randn(6, 3, 8, 8)
    torch.save({"x": x, "weights": model.state_dict()}, tmp_path / "given.pt")
    code = """
import importlib.util, torch
for name in ("fxpipe", "safetensors", "ortools", "rich"):
    assert importlib.util.find_spec(name) is None, name
from tree.small import load
from tree.small._fxpipe.errors import InputError, WeightsError
given = torch.load("given.pt")
pipe = load()
pipe.load_state_dict(given["weights"])
pipe.step(given["x"], loss_fn=lambda output, _: output.square().mean())
assert all(parameter.grad is not None for parameter in pipe.parameters())
pipe.load_state_dict(given["weights"])
torch.save(pipe.eval()(given["x"]), "found.pt")
pipe.save_weights("saved.safetensors")
for wrong in (lambda: pipe(given["x"][:0]), lambda: pipe.load_weights("model.safetensors")):
    try:
        wrong()
    except (InputError, WeightsError) as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "found.pt"), model(x))
    saved, state = load_file(tmp_path / "saved.safetensors"), model.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in state.items())
    assert "a batch of 0 rows can't be cut into micro-batches" in done.stdout
    assert "pip install safetensors" in done.stdout


def test_nothing_in_it_imports_fxpipe(package, tmp_path):
    out = package.write(tmp_path / "out", standalone=True)
    for path in out.rglob("*.py"):
        lines = path.read_text().splitlines()
        assert not [line for line in lines if line.lstrip().startswith(("import fx", "from fx"))]
    assert edits(out) == Edits()
    options = ["--isolated", "--no-cache", "--exclude", "_fxpipe"]
    for command in (["format", "--check"], ["check"]):
        subprocess.run([find_ruff_bin(), *command, *options, out], check=True)


def test_an_installed_fxpipe_loads_inspects_and_replaces_it(package, tmp_path):
    out = package.write(tmp_path / "out", standalone=True)
    x = torch.ones(4, 3, 8, 8)
    pipe = fxpipe.load(out).eval()
    assert pipe(x).shape == (4, 2)
    plan = json.loads((out / "plan.json").read_text())
    assert "_fxpipe/runtime/pipeline.py" in plan["files"]
    package.write(out)
    assert not (out / "_fxpipe").exists()
    assert fxpipe.load(shutil.copytree(out, tmp_path / "again")).eval()(x).shape == (4, 2)
