"""Emission: what is written is small, readable, equal in every run, and runs."""

import math
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import models
import pytest
import torch
from flat import compile_flat
from ruff import find_ruff_bin
from torch import nn

import fxpipe
from fxpipe.codegen.initial import initial_values
from fxpipe.runtime.random import microbatch_seeds

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    "skip": (models.Skip, (torch.ones(4, 6),), "cpu*3"),
    "norms": (models.Norms, (torch.ones(4, 3, 8, 8),), "cpu*2"),
    "tied": (models.Tied, (torch.ones(4, 5, dtype=torch.long),), "cpu*2"),
}
CASES["paths"] = (models.Paths, (torch.ones(4, 6),), "cpu*2")
SHOWN = ("stage_0.py", "stage_1.py", "stage_2.py", "schedule.csv", "__init__.py")


@cache
def compiled(name):
    model, args, devices = CASES[name]
    torch.manual_seed(0)
    return compile_flat(model(), args, devices=devices, microbatches=2)


@pytest.mark.parametrize("name", CASES)
def test_files_are_the_goldens(name, update_goldens):
    folder = GOLDEN / name
    package = compiled(name)
    files = {file: text for file, text in package.files.items() if file in SHOWN}
    if update_goldens:
        shutil.rmtree(folder, ignore_errors=True)  # may be half of one version, half of another
        package.write(folder)
    assert files == {file: (folder / file).read_text() for file in files}
    assert {path.name for path in folder.glob("*.py")} <= set(SHOWN)


@pytest.mark.parametrize("name", CASES)
def test_goldens_run_and_compute_what_the_model_does(name):
    kind, (x,), _ = CASES[name]
    model = kind().double()
    x = torch.randint(11, x.shape) if name == "tied" else torch.randn(x.shape, dtype=torch.double)
    pipe = fxpipe.load(GOLDEN / name).double()
    pipe.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    output = pipe(x)
    output.square().mean().backward()
    torch.manual_seed(1)
    for seed, part in zip(microbatch_seeds(2), x.split(2), strict=True):
        torch.manual_seed(seed)
        (model(part).square().mean() / 2).backward()
    for (key, plain), (own, pipelined) in zip(
        model.named_parameters(), pipe.named_parameters(), strict=True
    ):
        assert key == own
        torch.testing.assert_close(pipelined.grad, plain.grad, rtol=1e-10, atol=1e-12)
    for key, plain in model.named_buffers():
        torch.testing.assert_close(pipe.get_buffer(key), plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_files_pass_ruff_as_users_run_it(name, tmp_path):
    folder = compiled(name).write(tmp_path / "out")
    for command in (["format", "--check"], ["check"]):
        subprocess.run([find_ruff_bin(), *command, "--isolated", "--no-cache", folder], check=True)


def test_stage_files_import_torch_alone():
    for name in CASES:
        for file, text in compiled(name).files.items():
            if file.startswith("stage_"):
                imports = [
                    line for line in text.splitlines() if line.startswith(("import", "from"))
                ]
                assert {line.split()[1].split(".")[0] for line in imports} == {"torch"}


def test_a_stage_imports_what_its_lines_name(tmp_path):
    class Rounded(models.Chain):
        def forward(self, x):
            return self.layers(x) * math.ceil(x.size(0) ** 0.5)

    model = Rounded()
    package = compile_flat(model, (torch.randn(4, 6),), devices="cpu*2", microbatches=2)
    assert "import math\n\n" in package.files["stage_1.py"]
    x = torch.randn(8, 6)
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    torch.testing.assert_close(pipe(x), torch.cat([model(part) for part in x.split(4)]))


def structured():
    torch.manual_seed(0)
    pair = (torch.randn(4, 6), torch.randn(4, 6))
    weight = {"weight": torch.randn(6)}
    return compile_flat(models.Structured(), (pair,), weight, devices="cpu*2", microbatches=2)


def test_two_compiles_from_one_profile_are_equal_byte_for_byte(tmp_path):
    structured().write(tmp_path / "here")
    script = "import sys, test_emit; test_emit.structured().write(sys.argv[1])"
    # Hashes here are other ones, at random if no seed is set for this process.
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, tmp_path / "there"]
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parent)
    here, there = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("here", "there")
    )
    assert "buffers.pt" in here
    assert here == there


class Awkward(nn.Module):
    """Module names that are no identifiers, or code."""

    NAMES = ("class", "a b", 'x"; raise SystemExit; "', "naïve", "0", "line\nbreak")

    def __init__(self):
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x):
        for name in self.NAMES:
            x = self._modules[name](x)
        return x


def sequence():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize("make", [Awkward, sequence])
def test_awkward_module_names_are_kept(make, tmp_path):
    model = make()
    package = compile_flat(model, (torch.randn(4, 3),), devices="cpu*2", microbatches=2)
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    x = torch.randn(4, 3)
    torch.testing.assert_close(pipe(x), model(x))
    assert list(pipe.state_dict()) == list(model.state_dict())


def test_what_comments_alone_name_is_not_imported():
    class Scaled(nn.Module):
        def forward(self, x):
            return x / math.sqrt(4 * (math.sin(0) + math.cos(0)))  # a number when it is written

    package = compile_flat(Scaled(), (torch.randn(4, 6),), devices="cpu*1", microbatches=2)
    text = package.files["stage_0.py"]
    assert "math.sqrt" in text  # the user's line
    assert "import math" not in text


def test_what_begins_as_plain_noise_is_scaled_by_nothing():
    assert initial_values(torch.randn(200), (200,)) == "torch.randn(200)"
    assert initial_values(torch.randn(200) / 10, (200,)) == "torch.randn(200) * 0.1"
