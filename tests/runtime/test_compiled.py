"""`load(..., compile=True)`: stages through torch.compile give the plain model's numbers."""

import shutil

import pytest
import torch
from torch import nn
from toys import (
    CHAIN,
    NOISY,
    TOYS,
    Chain,
    Part,
    Toy,
    assert_same_state,
    mean_loss,
    plain_step,
    same,
    write,
)

from fxpipe.errors import StageError
from fxpipe.runtime import Runner, load

ONE = Toy(
    Chain,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(6, 7)
                self.body = nn.ModuleDict({"step": nn.Linear(7, 7), "stages": nn.Linear(7, 7)})
                self.last = nn.Linear(7, 3)

            def forward(self, x):
                h = torch.relu(self.body["step"](self.first(x)))
                return self.last(torch.tanh(self.body["stages"](h)))
            """,
            (None,),
            ("y",),
        ),
    ),
)


class Adds(nn.Module):
    """Products of matrices added `alpha` times: to a value, and in place to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.down, self.up = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 6))
        self.register_buffer("seen", torch.zeros(6, 6))

    def forward(self, x):
        h = self.first(x)
        y = torch.sub(torch.add(h, h @ self.down @ self.up, alpha=0.1), h @ h.t() @ h, alpha=0.2)
        self.seen.mul_(0.9).add_(h.detach().t() @ h.detach(), alpha=0.1)
        return torch.add(h @ self.seen.clone(), y, alpha=2) + torch.add(y, 1, alpha=3)


ADDS = Toy(
    Adds,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(6, 6)
                self.down = nn.Parameter(torch.randn(6, 2))
                self.up = nn.Parameter(torch.randn(2, 6))
                self.register_buffer("seen", torch.zeros(6, 6))

            def forward(self, x):
                h = self.first(x)
                y = torch.add(h, h @ self.down @ self.up, alpha=0.1)
                y = torch.sub(y, h @ h.t() @ h, alpha=0.2)
                self.seen.mul_(0.9).add_(h.detach().t() @ h.detach(), alpha=0.1)
                return torch.add(h @ self.seen.clone(), y, alpha=2) + torch.add(y, 1, alpha=3)
            """,
            (None,),
            ("y",),
            mutated=("seen",),
        ),
    ),
)


class Counts(nn.Module):
    """A number that each micro-batch adds to, and is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return self.layer(x) * (1 + self.seen * 0.1)


COUNTS = Toy(
    Counts,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(6, 3)
                self.register_buffer("seen", torch.zeros(()))

            def forward(self, x):
                self.seen.add_(1)
                return self.layer(x) * (1 + self.seen * 0.1)
            """,
            (None,),
            ("y",),
            mutated=("seen",),
        ),
    ),
)


class LooksUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3)

    def forward(self, x):
        return self.table(x[:, 0].abs().long())


LOOKS_UP = Toy(
    LooksUp,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(6, 3)

            def forward(self, x):
                return self.table(x[:, 0].abs().long())
            """,
            (None,),
            ("y",),
        ),
    ),
)


@pytest.fixture
def traced_only(monkeypatch):
    """All of torch.compile but inductor's kernels, which take a C++ compiler seconds."""
    compiled = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, options: compiled(self, backend="aot_eager")
    )


def _both(folder, toy, **settings):
    pipe = load(write(folder, toy, **settings), compile=True)
    torch.manual_seed(2)
    model = toy.model().double()
    pipe.load_state_dict(model.state_dict())
    return model, pipe


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(
    ("name", "mode", "schedule"),
    [
        ("skips", "never", "1f1b"),
        ("tied", "always", "1f1b"),
        ("normed", "except_last", "1f1b"),
        ("skips", "segment", "1f1b"),
        ("tied", "segment", "1f1b"),
        ("skips", "never", "split"),
        ("tied", "always", "split"),
        ("skips", "segment", "split"),
    ],
)
def test_steps_of_several_batch_sizes_equal_the_plain_models(tmp_path, name, mode, schedule):
    toy = TOYS[name]
    model, pipe = _both(tmp_path, toy, schedule=schedule, checkpoint=mode)
    for batch in (8, 10):
        x = toy.inputs(batch)
        expected = plain_step(toy, model, x, 4, False)
        assert same(pipe.step(*x, loss_fn=mean_loss), expected)
    assert_same_state(pipe, model)


@pytest.mark.usefixtures("traced_only")
def test_it_trains_and_evaluates_when_called(tmp_path):
    model, pipe = _both(tmp_path, CHAIN)
    x = CHAIN.inputs()
    for training in (True, False):
        model.train(training)
        pipe.train(training)
        expected = plain_step(CHAIN, model, x, 4, False)
        loss = mean_loss(pipe(*x))
        assert same(loss.detach(), expected)
        loss.backward()
    assert_same_state(pipe, model)


@pytest.mark.usefixtures("traced_only")
def test_an_error_of_compiled_code_says_how_to_see_its_line(tmp_path):
    folder = write(tmp_path, LOOKS_UP)
    wrong = torch.full((8, 6), 6.0, dtype=torch.float64)
    for compile, says in (
        (True, r"failed in 0F0: IndexError: .* range.*; load without compile=True to see the line"),
        (False, r"failed in 0F0, stage_0.py, line \d+: `return self.table.*`: IndexError"),
    ):
        pipe = load(folder, compile=compile)
        pipe.step(wrong - 1, loss_fn=mean_loss)
        with pytest.raises(StageError, match=says):
            pipe.step(wrong, loss_fn=mean_loss)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("asked", ["retain_graph", "create_graph"])
def test_a_backward_that_another_shall_follow_is_refused(tmp_path, asked):
    _, pipe = _both(tmp_path, CHAIN)
    says = rf"{asked}=True\) can't come through stage 2, .* load without compile=True"
    loss = mean_loss(pipe(*CHAIN.inputs()))
    with pytest.raises(StageError, match=says):
        torch.autograd.grad(loss, [*pipe.parameters()], **{asked: True})
    mean_loss(pipe(*CHAIN.inputs())).backward()


@pytest.mark.usefixtures("traced_only")
def test_a_closure_may_keep_its_graph(tmp_path):
    model, pipe = _both(tmp_path, CHAIN)
    runner = Runner(4)

    def closure(x):
        loss = mean_loss(pipe(x)) * runner.share
        loss.backward(retain_graph=True)
        return loss

    x = CHAIN.inputs()
    expected = plain_step(CHAIN, model, x, 4, False)
    assert same(sum(loss.detach() for loss in runner.step(closure, *x)), expected)
    assert_same_state(pipe, model)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor's kernels for CPU need g++")
@pytest.mark.parametrize("toy", [ONE, ADDS], ids=["layers", "sums of products"])
def test_kernels_of_inductor_give_the_same(tmp_path, toy):
    model, pipe = _both(tmp_path, toy)
    x = toy.inputs(8)
    expected = plain_step(toy, model, x, 4, False)
    assert same(pipe.step(*x, loss_fn=mean_loss), expected)
    assert_same_state(pipe, model)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor's kernels for CPU need g++")
def test_peaks_are_those_of_stages_that_are_not_compiled(tmp_path):
    """While they are counted, compiled stages run op by op."""
    peaks = []
    folder = write(tmp_path, ONE)
    for compile in (False, True):
        pipe = load(folder, compile=compile)
        for _ in range(2):
            with pipe.memory() as memory:
                pipe.step(*ONE.inputs(8), loss_fn=mean_loss)
        peaks += [peak.measured_bytes for peak in memory.peaks]
    assert peaks[0] == peaks[1] > 0


def test_a_stage_that_draws_random_numbers_is_left_as_it_is(tmp_path):
    pipe = load(write(tmp_path, NOISY), compile=True)
    assert all(stage.module._compiled_call_impl is None for stage in pipe._stages)


def test_a_stage_that_counts_in_what_it_recomputes_is_left_as_it_is(tmp_path):
    pipe = load(write(tmp_path, TOYS["normed"], checkpoint="segment"), compile=True)
    compiled = [stage.module._compiled_call_impl is not None for stage in pipe._stages]
    assert compiled == [not stage.spec.mutated_buffers for stage in pipe._stages]


@pytest.mark.usefixtures("traced_only")
def test_a_stage_that_writes_a_number_is_left_as_it_is(tmp_path):
    """As AOTAutograd in float64 would lose what is written."""
    model, pipe = _both(tmp_path, COUNTS)
    x = COUNTS.inputs(8)
    expected = plain_step(COUNTS, model, x, 4, False)
    assert same(pipe.step(*x, loss_fn=mean_loss), expected)
    assert_same_state(pipe, model)
    assert not pipe._stages[0].is_compiled


@pytest.mark.usefixtures("traced_only")
def test_kernels_for_the_cpu_leave_python_to_other_lanes(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, options: asked.append(options))
    load(write(tmp_path, CHAIN), compile=True)
    assert [options["cpp_wrapper"] for options in asked] == [True] * len(CHAIN.parts)


def test_an_error_while_tracing_says_the_line(tmp_path):
    _, pipe = _both(tmp_path, CHAIN)
    file = tmp_path / "stage_1.py"
    file.write_text(file.read_text().replace("relu(self", "relu(h[:, :3] + self"))
    pipe = load(tmp_path, compile=True)
    with pytest.raises(StageError, match=r"stage 1 failed in 1F0, stage_1.py, line 13: `return "):
        pipe.step(*CHAIN.inputs(8), loss_fn=mean_loss)
