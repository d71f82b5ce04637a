"""Each example, compiled, run and verified: the plain model's numbers in float64.

The examples' structure is whole, sizes are small. Of each, the graph is captured and its ops are
measured once: what varies here comes after.
"""

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import recomputing
from pairs import all_pairs

from fxpipe import compiler, target
from fxpipe.ir import CheckpointMode
from fxpipe.package import Package
from fxpipe.runtime import load
from fxpipe.target import Target
from fxpipe.verify import verify

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = {
    "unet": {"B": 1, "C": 4},
    "gpt2": {"LAYERS": 4, "HIDDEN": 32, "HEADS": 4, "SEQUENCE": 16, "VOCABULARY": 64},
    "resnet": {"WIDTH": 4, "BLOCKS": 3, "IMAGE": 32},
    "amoebanet": {"LAYERS": 3, "FILTERS": 16},
    "train_distributed": {"LAYERS": 2, "WIDTH": 32, "CONTEXT": 16},
}
# Micro-batches of unequal size: 3, 3, 2, 2.
BATCH, MICROBATCHES = 10, 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Example:
    """A target file of a small size, compiled again and again from one capture and profile."""

    def __init__(self, name: str, folder: Path) -> None:
        text = (EXAMPLES / f"{name}.py").read_text()
        for constant, value in SMALL[name].items():
            pattern = rf"^{constant} = \d+$"
            text, found = re.subn(pattern, f"{constant} = {value}", text, flags=re.MULTILINE)
            assert found == 1
        file = folder / f"small_{name}.py"
        file.write_text(text)
        self.target: Target = target.load(str(file))
        self.first: Package | None = None

    def compile(self, n_stages: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Package:
        model = self.target.build()
        inputs = self.target.inputs(BATCH, model)
        if self.first is not None:
            captured = self.first.capture
            monkeypatch.setattr(compiler, "capture_model", lambda *_: captured)
            options["profile"] = self.first.profile
        package = compiler.compile(
            model,
            inputs.args,
            inputs.kwargs,
            devices=["cpu"] * n_stages,
            microbatches=MICROBATCHES,
            **options,
        )
        self.first = self.first or package
        return package


@pytest.fixture(scope="module", params=["unet", "gpt2", "resnet"])
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example(request.param, tmp_path_factory.mktemp("example"))


@pytest.mark.parametrize(
    ("n_stages", "checkpoint", "schedule"),
    all_pairs([1, 2, 4], list(CheckpointMode), ["gpipe", "1f1b"]),
)
def test_example_computes_what_the_plain_model_does(
    example, n_stages, schedule, checkpoint, tmp_path, monkeypatch
):
    package = example.compile(n_stages, monkeypatch, schedule=schedule, checkpoint=checkpoint)
    out = package.write(tmp_path / "out")
    result = verify(out, example.target)
    assert result.equal, result
    compared = {difference.group: difference.tensors for difference in result.differences}
    assert compared["step(): gradients"] == len(list(example.target.build().parameters()))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_example_computes_the_same_where_parts_of_its_stages_are_recomputed(
    example, schedule, tmp_path, monkeypatch
):
    package = example.compile(2, monkeypatch, schedule=schedule)
    stages = [*pairwise([0, *package.plan.cuts, len(package.chain.blocks)])]
    segments = [
        [(begin + 1, end - 2), (end - 2, end)] if end - begin > 3 else [(begin, end)]
        for begin, end in stages
    ]
    segments[-1] = [stages[-1]]
    package = recomputing(package, segments)
    result = verify(package.write(tmp_path / "out"), example.target, batch=9)
    assert result.equal, result


def test_cells_that_read_the_two_before_them_are_cut_between(tmp_path, monkeypatch):
    amoebanet = Example("amoebanet", tmp_path)
    package = amoebanet.compile(2, monkeypatch)
    assert len(package.manifest.stages[1].inputs) > 1
    result = verify(package.write(tmp_path / "out"), amoebanet.target)
    assert result.equal, result


def test_skips_go_by_portal(example, monkeypatch):
    package = example.compile(4, monkeypatch)
    stages = package.manifest.stages
    jumps = [
        port.portal
        for j, stage in enumerate(stages)
        for port in stage.inputs
        if port.source is not None and port.source < j - 1
    ]
    assert all(jumps)
    assert bool(jumps) is (example.target.name.endswith(("unet.py", "gpt2.py")))


def test_shards_that_transformers_wrote_are_loaded(example, tmp_path, monkeypatch):
    model = example.target.build()
    if not hasattr(model, "save_pretrained"):
        pytest.skip("no model of transformers")
    pipe = load(example.compile(2, monkeypatch).write(tmp_path / "out"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.save_pretrained(tmp_path / "trained", max_shard_size="10KB")
    assert len(list((tmp_path / "trained").glob("*.safetensors"))) > 1
    pipe.load_weights(tmp_path / "trained")
    state = model.state_dict()
    assert list(pipe.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in pipe.state_dict().items())


def test_transformers_loads_what_a_pipeline_has_saved(tmp_path, monkeypatch):
    gpt2 = Example("gpt2", tmp_path)
    model = gpt2.target.build()
    pipe = load(gpt2.compile(2, monkeypatch).write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    model.config.save_pretrained(tmp_path / "trained")
    state = model.state_dict()
    for size in ("10KB", "5GB"):
        pipe.save_weights(tmp_path / "trained", size)
        assert (len(list((tmp_path / "trained").glob("*.safetensors"))) > 1) is (size == "10KB")
        again, told = type(model).from_pretrained(tmp_path / "trained", output_loading_info=True)
        assert not any(told.values()), told
        assert list(again.state_dict()) == list(state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


# Of the script, to see each loss to its last bit, and to end one process in its first life.
CHANGES = {
    "import argparse": "import argparse, os",
    "value.item():.4f": "value.item()!r",
    "in range(begin, options.steps):\n": """in range(begin, options.steps):
        if step == 11 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)
""",
}


def by_slurm(folder: Path, *arguments: str) -> str:
    """What is printed where SLURM's commands are replaced by what they do on one node."""
    for name, does in {"scontrol": "echo localhost", "srun": 'exec "$@"'}.items():
        (folder / name).write_text(f"#!/bin/bash\n{does}\n")
        (folder / name).chmod(0o755)
    job = {"JOB_ID": os.getpid(), "JOB_NUM_NODES": 1, "CPUS_PER_TASK": 2, "JOB_NODELIST": "here"}
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(EXAMPLES / "train_distributed.slurm"), *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path, **{f"SLURM_{k}": str(v) for k, v in job.items()}},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_whose_process_is_killed_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    if shutil.which("torchrun", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("torch was installed without torchrun")
    example = Example("train_distributed", tmp_path)
    out = example.compile(2, monkeypatch).write(tmp_path / "out", weights=True)
    text = (tmp_path / "small_train_distributed.py").read_text()
    for old, new in CHANGES.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/train_distributed.py").write_text(text)
    options = ["--steps", "14", "--save-every", "4", "--batch", str(BATCH)]
    printed = by_slurm(tmp_path, str(out), *options)
    told = [(int(k), float(x)) for k, x in re.findall(r"step +(\d+)  loss ([\d.]+)", printed)]
    assert [step for step, _ in told] == [*range(11), *range(8, 14)]
    assert len(set(told)) == 14  # what is done again is the same again

    pipe, draw = load(out), example.target.factory.__globals__["text"]
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    losses = []
    for step in range(14):
        letters = draw(BATCH, step)
        optimizer.zero_grad()
        losses.append(pipe.step(letters, target=letters, loss_fn=example.target.loss).item())
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
    assert [loss for _, loss in sorted(set(told))] == pytest.approx(losses, rel=1e-3)
    assert losses[-1] < 0.9 * losses[0]
    letters = draw(BATCH, 14)
    with torch.no_grad():
        trained = pipe(letters)
        pipe.load_weights(tmp_path / "run/gpt/model")
        torch.testing.assert_close(pipe(letters), trained, rtol=1e-2, atol=1e-2)
