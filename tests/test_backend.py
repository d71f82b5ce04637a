"""The backend of torch.compile: a part of a larger program, pipelined, numbers as before."""

import copy
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

import models
import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

import fxpipe
from fxpipe.backend import backend
from fxpipe.errors import CaptureError, PackageError
from fxpipe.runtime.random import microbatch_seeds

OPTIONS = {"devices": "cpu*2", "microbatches": 2}
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def compiled(module, **options):
    return torch.compile(module, backend=backend, options={**OPTIONS, **options})


def batch(rows):
    return torch.randn(rows, 6, dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def close_gradients(found, expected):
    for (name, mine), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            close(mine.grad, theirs.grad)


class Body(nn.Module):
    """Reads the batch size, has a dict as its output, and a frozen layer inside."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[1].requires_grad_(False)

    def forward(self, x, scale=None):
        rows, width = x.shape
        for layer in self.layers:
            x = layer(x).tanh().view(rows, 2, width // 2).flatten(1)
        return {"y": x if scale is None else x * scale, "mean": x.mean()}


class Program(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(6, 6).requires_grad_(False)
        self.first = nn.Linear(6, 6)
        self.body = Body()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(self.before(x))
        if x.sum() > 0:  # what a pipeline could not hold
            x = -x
        found = self.body(x, scale=x.detach().abs())
        return self.head(found["y"]) + found["mean"]


def programs():
    plain = Program().double()
    program = copy.deepcopy(plain)
    program.body = compiled(program.body)
    return plain, program


def test_a_part_of_a_program_trains_as_the_plain_program_does():
    plain, program = programs()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (plain, program)]
    for rows in (8, 5, 6):
        x = batch(rows)
        for model, optimizer in zip((plain, program), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
        close(program(x), plain(x))
        close_gradients(program, plain)
        for optimizer in optimizers:
            optimizer.step()
    close(program(x), plain(x))


def test_eval_and_no_grad_and_inputs_with_a_gradient():
    plain, program = programs()
    x = batch(6)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for model in (plain, program):
            model.eval()
        with mode():
            close(program(x), plain(x))
    given, expected = batch(6).requires_grad_(), None
    program.body(given)["y"].pow(2).sum().backward()
    expected = given.grad.clone()
    given.grad = None
    plain.body(given)["y"].pow(2).sum().backward()
    close(expected, given.grad)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.frozen = nn.BatchNorm1d(6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.b = nn.Linear(6, 6)

    def forward(self, x):
        x = self.norm(self.frozen(self.a(x)))
        return self.b(F.dropout(self.drop(x), 0.2, self.training))


def test_each_module_keeps_its_own_mode_and_buffers_are_the_models():
    plain = Noisy().double()
    plain.frozen.running_mean += 0.5
    module = copy.deepcopy(plain)
    pipelined = compiled(module)
    x = batch(6)
    for training in (True, False, True):
        for model in (plain, module):
            model.train(training)
            model.frozen.eval()
        torch.manual_seed(1)
        found = pipelined(x)
        torch.manual_seed(1)
        expected = []
        for seed, piece in zip(microbatch_seeds(2), x.chunk(2), strict=True):
            if training:
                torch.manual_seed(seed)
            expected.append(plain(piece))
        close(found, torch.cat(expected))
        for (name, mine), theirs in zip(module.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, theirs), name


def test_one_pipeline_serves_all_batches_and_grad_modes(tmp_path):
    program = compiled(Body().double(), out=str(tmp_path / "body"))
    for rows in (4, 9, 2):
        program(batch(rows))
        with torch.no_grad():
            program(batch(rows))
    assert [path.name for path in tmp_path.iterdir()] == ["body"]
    stage = (tmp_path / "body" / "stage_0.py").read_text()
    assert all(words in stage for words in ("nn.Linear(6, 6", "self.layers[", "test_backend.py"))


def test_another_length_is_compiled_anew_and_one_row_is_not(tmp_path):
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            rows, length, _ = x.shape
            place = torch.arange(length, device=x.device)
            return self.b(self.a(x).view(rows, length, 6) * place[None, :, None])

    plain = Sequence().double()
    program = compiled(copy.deepcopy(plain), microbatches=1, out=str(tmp_path / "out"))
    for shape in ((4, 5, 6), (3, 5, 6), (1, 5, 6), (3, 7, 6), (2, 7, 6), (1, 7, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        close(program(x), plain(x))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-2"]


class Turns(nn.Module):
    """What it does hangs on `how`, though the same ops are called of tensors of the same sizes."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(6, 6), nn.Linear(6, 6), how

    def forward(self, x):
        a = self.a(x).tanh()
        b = self.b(a)
        match self.how:
            case "outputs":
                return a, b
            case "output":
                return b
            case "one way" | "other way":
                return a - b if self.how == "one way" else b - a
            case "none" | "tanh":
                return F.gelu(b, approximate=self.how)
            case int():
                return torch.roll(b, self.how, 1)
            case float():
                return b * self.how
            case tuple():
                return F.pad(b, self.how)
            case "b of b" | "a of b":
                return self.b(b) if self.how == "b of b" else self.a(b)


@pytest.mark.parametrize(
    "ways",
    [
        ("outputs", "output"),
        ("one way", "other way"),
        ("none", "tanh"),
        (1, 2),
        (1.0, 2.0),
        ((1, 1), (2, 0)),
        ("b of b", "a of b"),
    ],
    ids=str,
)
def test_another_graph_of_the_same_ops_is_another_pipeline(ways):
    program = compiled(Turns(ways[0]).double())
    plain = copy.deepcopy(program)
    for rows in (4, 5, 1):
        for how in (*ways, ways[0]):
            program.how = plain.how = how
            x = batch(rows)
            torch.testing.assert_close(program(x), plain._orig_mod(x), rtol=1e-10, atol=1e-12)


def test_one_batch_size_only_is_told():
    class Frozen(models.Chain):
        def forward(self, x):
            return self.layers(x).view(4, 6)

    with pytest.raises(CaptureError, match="one batch size only, 4"):
        compiled(Frozen())(torch.randn(4, 6))


def test_two_parts_of_one_program_and_a_tie_between_calls():
    plain = nn.Sequential(models.Skip(), nn.Tanh(), nn.Linear(3, 6), models.Skip()).double()
    program = copy.deepcopy(plain)
    program[0], program[3] = compiled(program[0]), compiled(program[3], schedule="gpipe")
    x = batch(8)
    for model in (plain, program):
        model(x).pow(2).mean().backward()
    close_gradients(program, plain)


def test_a_runner_steps_through_a_compiled_part():
    plain, program = programs()
    runner, seen = fxpipe.Runner(4), []
    program.body = compiled(program.body._orig_mod, microbatches=4)
    x = batch(10)  # the micro-batch that it is compiled on has fewer rows than there are of them

    def closure(piece):
        loss = program(piece).pow(2).mean() * runner.share
        loss.backward()
        seen.append(len(piece))
        return loss.detach()

    for _ in range(2):
        runner.step(closure, x)
    assert seen == [3, 3, 2, 2] * 2
    for piece in x.split([3, 3, 2, 2]):
        for _ in range(2):
            (plain(piece).pow(2).mean() * len(piece) / 10).backward()
    close_gradients(program, plain)


def test_a_module_is_not_kept_alive():
    module = Body().double()
    compiled(module)(batch(4))
    gone = weakref.ref(module)
    del module
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


class Branching(models.Chain):
    def forward(self, x):
        x = self.layers(x)
        if x.sum() > 0:
            x = x * 2
        return x


def function(x):
    return x * 2


@pytest.mark.parametrize(
    ("module", "options", "says"),
    [
        (models.Chain(), {"devices": None}, "devices must be given"),
        (models.Chain(), {"stages": 3}, "there is no stages"),
        (function, {}, "pipelines modules, not functions"),
        (Branching(), {}, "if x.sum"),
    ],
)
def test_wrong_use_is_told(module, options, says):
    settings = {k: v for k, v in {**OPTIONS, **options}.items() if v is not None}
    with pytest.raises(BackendCompilerFailed, match=says):
        torch.compile(module, backend=backend, options=settings)(torch.randn(4, 6))


def test_an_input_that_is_written_in_place_is_told():
    class Writing(models.Chain):
        def forward(self, x):
            return self.layers(x.mul_(2))

    with pytest.raises(CaptureError, match="writes its input 'x' in place: what is around it"):
        compiled(Writing())(torch.randn(4, 6))


def test_one_of_many_processes_is_told_how_they_make_one_pipeline(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BackendCompilerFailed, match=r"one process.*load\(OUT, distributed=True\)"):
        compiled(models.Chain())(torch.randn(4, 6))


def test_a_folder_that_is_not_ours_is_told_before_the_work(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    module = compiled(models.Chain(), out=str(tmp_path / "mine"))
    with (
        mock.patch("fxpipe.backend.compile", side_effect=AssertionError),
        pytest.raises(PackageError, match="mine"),
    ):
        module(torch.randn(4, 6))


def test_torch_finds_the_backend_by_name_as_the_example_has_it(tmp_path):
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["torch_dynamo_backends"]
    info = tmp_path / "fxpipe-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fxpipe\nVersion: 0\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\n" + "\n".join(lines))
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/partial.py")],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    last = done.stdout.splitlines()[-1:]
    assert last, done.stderr
    assert float(last[0].rpartition(" ")[2]) < 1e-12, done.stdout
    assert (tmp_path / "build/body/stage_1.py").exists()


def test_a_module_that_draws_may_be_called_first_in_a_runners_closure():
    layers = [nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)]
    plain, x = nn.Sequential(*layers).double(), batch(4)
    model = compiled(copy.deepcopy(plain))

    def closure(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss.detach()

    torch.manual_seed(5)
    found = fxpipe.Runner(2).step(closure, x)
    torch.manual_seed(5)
    for seed, piece, loss in zip(microbatch_seeds(2), x.chunk(2), found, strict=True):
        torch.manual_seed(seed)
        expected = plain(piece).pow(2).mean()
        expected.backward()
        close(loss, expected.detach())
    close_gradients(model, plain)
