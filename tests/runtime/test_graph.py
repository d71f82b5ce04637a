"""A captured step does what an eager one does, each time anew; what can't be captured is told.

Without a CUDA device a stand-in captures: like a CUDA graph it leaves all as it was when it
captures, and when it is replayed runs the step on the memory it was captured on.
"""

import copy
import re
import warnings
from contextlib import nullcontext

import pytest
import torch
from pairs import all_pairs
from torch import nn
from torch.amp import GradScaler
from toys import (
    BATCH,
    CHAIN,
    MODES,
    NOISY,
    NORMED,
    SCHEDULES,
    SKIPS,
    TOYS,
    Part,
    Toy,
    assert_same_state,
    both,
    mean_loss,
    plain_step,
    same,
)

from fxpipe.errors import InputError, StageError
from fxpipe.runtime import graph, load

CAPTURABLE = [name for name in TOYS if TOYS[name] is not NOISY]


class Stand:
    """Captures as a CUDA graph would. `captures` counts."""

    def __init__(self):
        self.captures = 0
        self.fails = None
        self.pipe = None

    def captured(self, room, run):
        if self.fails is not None:
            raise self.fails
        self.captures += 1
        state = [*self.pipe.parameters(), *self.pipe.buffers()]
        kept = [*state, *(p.grad for p in self.pipe.parameters() if p.grad is not None)]
        before = [tensor.detach().clone() for tensor in kept]
        outcome = run()
        with torch.no_grad():
            for tensor, value in zip(kept, before, strict=True):
                tensor.copy_(value)
            for tensor in self.tensors(outcome):
                tensor.fill_(float("nan"))  # nothing is computed yet

        def replay():
            found = self.tensors(run())
            for tensor, value in zip(self.tensors(outcome), found, strict=True):
                tensor.copy_(value)

        return outcome, replay

    @staticmethod
    def tensors(outcome):
        loss, gradients = outcome
        return [loss, *(gradient for gradient in gradients if gradient is not None)]


@pytest.fixture
def stand(monkeypatch):
    found = Stand()
    monkeypatch.setattr(graph, "obstacle", lambda devices, stages: None)
    monkeypatch.setattr(graph, "graph_room", lambda device: "room")
    monkeypatch.setattr(graph, "in_room", lambda room: nullcontext())
    monkeypatch.setattr(graph, "captured", found.captured)
    return found


def captured(folder, toy, stand, **settings):
    """The plain model and its pipeline, whose steps are captured."""
    model, _ = both(folder, toy, **settings)
    stand.pipe = load(folder, capture="graph")
    stand.pipe.load_state_dict(model.state_dict())
    return model, stand.pipe


@pytest.mark.parametrize(("name", "mode", "schedule"), all_pairs(CAPTURABLE, MODES, SCHEDULES))
def test_captured_steps_equal_the_plain_models(tmp_path, stand, name, mode, schedule):
    toy = TOYS[name]
    model, pipe = captured(tmp_path, toy, stand, schedule=schedule, checkpoint=mode)
    for batch in (BATCH, BATCH, 9, BATCH):
        x = toy.inputs(batch)
        expected = plain_step(toy, model, x, 4)
        assert same(pipe.step(*x, loss_fn=mean_loss), expected)
    assert_same_state(pipe, model)
    assert stand.captures == 2


def test_it_is_trained_like_any_other(tmp_path, stand):
    model, pipe = captured(tmp_path, SKIPS, stand)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (model, pipe)]
    generator = torch.Generator().manual_seed(3)
    for k in range(6):
        x = torch.randn(BATCH, 6, dtype=torch.float64, generator=generator)
        expected = plain_step(SKIPS, model, (x,), 4)
        assert same(pipe.step(x, loss_fn=mean_loss), expected)
        if k % 2:  # gradients of two steps are added up
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=k != 3)
    assert_same_state(pipe, model)
    assert stand.captures == 1


def test_gradients_that_are_there_are_added_to(tmp_path, stand):
    model, pipe = captured(tmp_path, CHAIN, stand)
    for parameter, other in zip(model.parameters(), pipe.parameters(), strict=True):
        parameter.grad = torch.ones_like(parameter)
        other.grad = parameter.grad.clone()
    for _ in range(2):
        plain_step(CHAIN, model, CHAIN.inputs(), 4)
        pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    assert_same_state(pipe, model)


def test_a_scaler_scales_each_replay(tmp_path, stand):
    model, pipe = captured(tmp_path, CHAIN, stand)
    scaler = GradScaler("cpu", init_scale=4.0)
    for scale in (4.0, 4.0, 2.0):
        if scale != scaler.get_scale():
            scaler.update(scale)
        model.zero_grad()
        pipe.zero_grad()
        expected = plain_step(CHAIN, model, CHAIN.inputs(), 4)
        assert same(pipe.step(*CHAIN.inputs(), loss_fn=mean_loss, scaler=scaler), expected)
        for parameter, other in zip(model.parameters(), pipe.parameters(), strict=True):
            assert same(other.grad, parameter.grad * scale)
    assert stand.captures == 1


def test_inputs_get_their_gradients(tmp_path, stand):
    model, pipe = captured(tmp_path, SKIPS, stand)
    plain, stepped = (SKIPS.inputs()[0].requires_grad_() for _ in range(2))
    for _ in range(2):
        plain_step(SKIPS, model, (plain,), 4)
        pipe.step(stepped * 1, loss_fn=mean_loss)
    assert same(stepped.grad, plain.grad)


def test_the_target_is_read_each_time(tmp_path, stand):
    _, pipe = captured(tmp_path, CHAIN, stand)
    eager = load(tmp_path)
    eager.load_state_dict(pipe.state_dict())
    x = CHAIN.inputs()[0]

    def loss_fn(output, target):
        return ((output - target["y"][0]) * target["scale"]).pow(2).mean()

    for k, scale in enumerate((2.0, 2.0, 3.0)):
        target = {"y": [torch.full((BATCH, 1), float(k), dtype=torch.float64)], "scale": scale}
        losses = [p.step(x, target=target, loss_fn=loss_fn) for p in (pipe, eager)]
        assert same(*losses)
    assert stand.captures == 2  # a number is no tensor: it is captured


def test_a_loss_is_the_callers(tmp_path, stand):
    _, pipe = captured(tmp_path, CHAIN, stand)
    first = pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    kept = first.clone()
    pipe.step(CHAIN.inputs()[0] * 5, loss_fn=mean_loss)
    assert torch.equal(first, kept)


def test_other_modes_weights_and_settings_are_captured_anew(tmp_path, stand):
    model, pipe = captured(tmp_path, CHAIN, stand)
    x = CHAIN.inputs()
    pipe.step(*x, loss_fn=mean_loss)
    pipe.eval()
    pipe.step(*x, loss_fn=mean_loss)
    assert stand.captures == 2
    pipe.train()
    pipe.step(*x, loss_fn=mean_loss)
    assert stand.captures == 2
    pipe.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    pipe.step(*x, loss_fn=mean_loss)
    assert stand.captures == 3
    next(pipe.parameters()).requires_grad_(False)
    pipe.zero_grad()
    pipe.step(*x, loss_fn=mean_loss)
    assert stand.captures == 4
    assert next(pipe.parameters()).grad is None


def test_deferred_batch_norm_is_captured_once(tmp_path, stand):
    model, _ = both(tmp_path, NORMED)
    pipes = [load(tmp_path, deferred_batch_norm=True, capture=how) for how in ("graph", None)]
    for pipe in pipes:
        pipe.load_state_dict(model.state_dict())
    stand.pipe = pipes[0]
    for _ in range(3):
        losses = [pipe.step(*NORMED.inputs(), loss_fn=mean_loss) for pipe in pipes]
        assert same(*losses)
    for key, value in pipes[1].state_dict().items():
        assert same(pipes[0].state_dict()[key], value), key
    assert stand.captures == 1


def test_only_so_many_graphs_are_kept_and_a_loss_fn_that_changes_is_told(tmp_path, stand):
    _, pipe = captured(tmp_path, CHAIN, stand)

    def step():
        pipe.step(*CHAIN.inputs(), loss_fn=lambda output, target: mean_loss(output))

    for _ in range(8):
        step()
    with pytest.warns(UserWarning, match="the same loss_fn object"):
        step()
    assert len(pipe._graphs._graphs) == 8


def test_a_capture_that_fails_says_why_once_and_the_step_runs_eagerly(tmp_path, stand):
    model, pipe = captured(tmp_path, CHAIN, stand)
    stand.fails = RuntimeError("the capture was invalidated")
    stand.fails.__context__ = StageError("stage 1 failed in 1F0, line 13: it waits\nand more")
    x = CHAIN.inputs()
    expected = [plain_step(CHAIN, model, x, 4) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"runs eagerly: stage 1 failed in 1F0, .* waits$"):
        assert same(pipe.step(*x, loss_fn=mean_loss), expected[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(pipe.step(*x, loss_fn=mean_loss), expected[1])
    assert_same_state(pipe, model)


class Counting(nn.Module):
    """Its buffer is another one after each forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("count", torch.zeros(6))

    def forward(self, x):
        self.count = self.count + x.detach().mean(0)
        return x * self.weight


COUNTING = Toy(
    Counting,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(6))
                self.register_buffer("count", torch.zeros(6))

            def forward(self, x):
                self.count = self.count + x.detach().mean(0)
                return x * self.weight
            """,
            (None,),
            ("y",),
            ("count",),
        ),
    ),
)


def test_a_buffer_that_is_replaced_cant_be_captured(tmp_path, stand):
    model, pipe = captured(tmp_path, COUNTING, stand)
    x = COUNTING.inputs()
    with pytest.warns(UserWarning, match="buffer 'count' is replaced in a step"):
        pipe.step(*x, loss_fn=mean_loss)
    pipe.step(*x, loss_fn=mean_loss)
    for _ in range(2):
        plain_step(COUNTING, model, x, 4)
    assert_same_state(pipe, model)
    assert stand.captures == 0


def test_what_an_eager_step_raises_is_raised(tmp_path, stand):
    _, pipe = captured(tmp_path, CHAIN, stand)
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(StageError, match="loss_fn failed on micro-batch 0"):
        pipe.step(*CHAIN.inputs(), loss_fn=lambda output, target: 1 / 0)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in pipe.parameters())
    pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)


def test_without_a_cuda_device_it_runs_eagerly_and_says_so(tmp_path):
    model, _ = both(tmp_path, CHAIN)
    pipe = load(tmp_path, capture="graph")
    pipe.load_state_dict(model.state_dict())
    expected = plain_step(CHAIN, model, CHAIN.inputs(), 4)
    with pytest.warns(UserWarning, match="no CUDA device, stages are on cpu"):
        assert same(pipe.step(*CHAIN.inputs(), loss_fn=mean_loss), expected)
    assert_same_state(pipe, model)


@pytest.mark.parametrize(
    ("devices", "toy", "reason"),
    [
        (["cuda:0", "cpu", "cuda:0"], CHAIN, "no CUDA device, stages are on cpu, cuda:0"),
        (["cuda:0", "cuda:1", "cuda:0"], CHAIN, "2 GPUs"),
        (["cuda:0"] * 3, NOISY, r"stage \d \(stage_\d.py\) draws random numbers"),
    ],
)
def test_what_cant_be_captured_is_known_before(tmp_path, devices, toy, reason):
    _, pipe = both(tmp_path, toy)
    found = graph.obstacle([torch.device(device) for device in devices], pipe._stages)
    assert re.search(reason, found)


def test_one_gpu_can_be_captured(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    assert graph.obstacle([torch.device("cuda:0")] * 3, pipe._stages) is None


def test_a_trace_is_of_an_eager_step(tmp_path, stand):
    _, pipe = captured(tmp_path, CHAIN, stand)
    with pipe.trace(tmp_path / "step.json"):
        pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    assert stand.captures == 0


def test_a_copy_captures_for_itself(tmp_path, stand):
    model, pipe = captured(tmp_path, CHAIN, stand)
    pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    other = copy.deepcopy(pipe)
    stand.pipe = other
    other.zero_grad()
    other.step(*CHAIN.inputs(), loss_fn=mean_loss)
    plain_step(CHAIN, model, CHAIN.inputs(), 4)
    assert_same_state(other, model)


def test_there_is_no_other_capture(tmp_path):
    both(tmp_path, CHAIN)
    with pytest.raises(InputError, match="there is no capture 'graphs'"):
        load(tmp_path, capture="graphs")
