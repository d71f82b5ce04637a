"""A part of a stage is computed again in backward: once, equal, and instead of being kept."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fxpipe.errors import StageError
from fxpipe.runtime.drawing import drawing
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.segment import Forward, checkpoint
from fxpipe.runtime.split import SplitBackward

CPU = torch.device("cpu")


class Body(nn.Module):
    """Two layers that count how often they run."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.down(torch.tanh(self.up(x)))


class Stage(nn.Module):
    """A body that is recomputed, between two layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, 4), Body(), nn.Linear(4, 4)

    def forward(self, x, part=checkpoint):
        return self.last(part(self.body, self.first(x)))

    def plain(self, x):
        return self.forward(x, lambda function, *args: function(*args))


def running(module, written=(), draws=None, recomputes=True):
    return Forward(module, CPU, written, draws, nullcontext).running(recomputes)


@pytest.fixture
def stage():
    torch.manual_seed(0)
    return Stage().double()


@pytest.fixture
def x():
    return torch.randn(3, 4, dtype=torch.float64, requires_grad=True)


def gradients(stage, x):
    found = [x.grad, *(p.grad for p in stage.parameters())]
    x.grad = None
    stage.zero_grad()
    return found


def expected_gradients(stage, x):
    stage.plain(x).sum().backward()
    stage.body.runs = 0
    return gradients(stage, x)


def test_backward_computes_it_again_once(stage, x):
    expected = expected_gradients(stage, x)
    with running(stage):
        y = stage(x)
    assert stage.body.runs == 1
    y.sum().backward()
    assert stage.body.runs == 2
    torch.testing.assert_close(gradients(stage, x), expected, rtol=0, atol=0)


def test_halves_of_a_backward_share_one_recomputation(stage, x):
    expected = expected_gradients(stage, x)
    begin = x.detach().requires_grad_()
    received = begin * 1
    with running(stage):
        y = stage(received)
    edge = torch.autograd.graph.get_gradient_edge
    split = SplitBackward([edge(y)], [torch.ones_like(y)])
    (x.grad,) = split.input_gradients([edge(received)])
    assert stage.body.runs == 2
    split.weight_gradients()
    assert stage.body.runs == 2
    torch.testing.assert_close(gradients(stage, x), expected)


def test_a_graph_that_is_kept_for_more_is_not_computed_again(stage, x):
    with running(stage):
        y = stage(x)
    y.sum().backward(retain_graph=True)
    first = gradients(stage, x)
    y.sum().backward()
    assert stage.body.runs == 2
    torch.testing.assert_close(gradients(stage, x), first)


def test_nothing_of_the_part_is_kept_until_backward_and_after_it(stage, x):
    made = []
    stage.body.up.register_forward_hook(lambda *call: made.append(weakref.ref(call[2])))
    gc.disable()
    try:
        with running(stage):
            y = stage(x)
        assert made[0]() is None
        y.sum().backward()
        assert [one() for one in made] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("gradients", [True, False])
def test_without_gradients_or_if_it_is_off_the_part_just_runs(stage, x, gradients):
    with running(stage, recomputes=not gradients), torch.set_grad_enabled(gradients):
        y = stage(x)
    if gradients:
        y.sum().backward()
    assert stage.body.runs == 1


def test_a_part_within_a_part_is_computed_again_with_it(stage, x):
    expected = expected_gradients(stage, x)
    with running(stage):
        y = checkpoint(stage, x)
    y.sum().backward()
    assert stage.body.runs == 2
    torch.testing.assert_close(gradients(stage, x), expected, rtol=0, atol=0)


class Scaled(nn.Module):
    """A part that is given a parameter, alone or in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(4, 4), Body()
        self.scale, self.shift = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

    def forward(self, x, part=checkpoint):
        return part(self.scaled, self.first(x), self.scale, [self.shift])

    def scaled(self, x, scale, shifts):
        return torch.sin(self.body(x) + x * scale) * shifts[0]

    plain = Stage.plain


def test_a_parameter_that_is_given_is_not_computed_again(x):
    torch.manual_seed(0)
    stage = Scaled().double()
    expected = expected_gradients(stage, x)
    with running(stage):
        y = stage(x)
    y.sum().backward()
    assert stage.body.runs == 2
    torch.testing.assert_close(gradients(stage, x), expected, rtol=0, atol=0)


def test_outside_of_a_pipeline_it_is_torchs_own(stage, x):
    expected = expected_gradients(stage, x)
    stage(x).sum().backward()
    assert stage.body.runs == 2
    torch.testing.assert_close(gradients(stage, x), expected, rtol=0, atol=0)


def test_random_numbers_are_drawn_again_whatever_came_in_between(x):
    body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()).double()
    found = []
    for part in (checkpoint, lambda function, *args: function(*args)):
        with drawing(RandomStream(7), CPU, body) as draws, running(body, draws=draws):
            y = part(body, nn.functional.dropout(x))
            y = nn.functional.dropout(part(body, y))
        end = draws.end
        torch.rand(3)
        y.sum().backward()
        found.append([y, end.state(CPU), x.grad, *(p.grad for p in body.parameters())])
        x.grad = None
        body.zero_grad()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_buffers_are_written_once_and_read_as_they_were(x):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
            self.norm = nn.BatchNorm1d(4).double()

        def forward(self, x):
            self.calls += 1
            return torch.tanh(self.norm(x) * self.calls.clone())

    found = []
    for part in (checkpoint, lambda function, *args: function(*args)):
        module = Counting()
        written = [name for name, _ in module.named_buffers()]
        outputs = []
        for _ in range(3):
            with running(module, written):
                outputs.append(part(module, x))
        for y in reversed(outputs):
            y.pow(2).sum().backward()
        found.append([x.grad, *module.buffers(), *(p.grad for p in module.parameters())])
        x.grad = None
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_autocast_is_as_it_was(stage, x):
    stage, x = stage.float(), x.detach().float().requires_grad_()
    with running(stage), torch.autocast("cpu", torch.bfloat16):
        y = stage(x)
    y.sum().backward()
    found = gradients(stage, x)
    with torch.autocast("cpu", torch.bfloat16):
        stage.plain(x).sum().backward()
    torch.testing.assert_close(found, gradients(stage, x), rtol=0, atol=0)


def test_lists_of_tensors_and_what_is_no_tensor_may_be_given(stage, x):
    def joined(tensors, scale, nothing):
        assert nothing is None
        return torch.tanh(torch.cat(tensors) * scale)

    with running(stage):
        y = checkpoint(joined, [x, x * 2], 3, None)
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(joined([x, x * 2], 3, None).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("inside", [True, False])
def test_a_list_may_grow_behind_the_part(stage, x, inside):
    values = [x]
    with running(stage) if inside else nullcontext():
        y = checkpoint(lambda tensors: torch.cat(tensors).sin(), values)
    values.append(y)
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, x.cos())


def test_an_input_that_is_written_in_place_is_an_error(stage, x):
    with running(stage):
        h = stage.first(x)
        y = checkpoint(stage.body, h)
        h += 1
    with pytest.raises(StageError, match=r"Body can't be computed again, an input .* in place"):
        y.sum().backward()


def test_another_computation_than_before_is_an_error(stage, x):
    def changing(x):
        stage.body.runs += 1
        return torch.tanh(x) if stage.body.runs > 1 else torch.tanh(x).sin()

    with running(stage):
        y = checkpoint(changing, x)
    with pytest.raises(StageError, match=r"changing .* needs 2 tensors, computed again it has 1"):
        y.sum().backward()


def test_it_is_not_torchs_while_another_lane_compiles(stage, x, monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # which all lanes see
    monkeypatch.setattr("fxpipe.runtime.segment.torch_checkpoint", None)
    expected = expected_gradients(stage, x)
    with running(stage):
        stage(x).sum().backward()
    torch.testing.assert_close(gradients(stage, x), expected, rtol=0, atol=0)
