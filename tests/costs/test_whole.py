"""The whole graph is timed on one lane beside busy others, and the model is left as it was."""

import threading
from math import inf
from typing import ClassVar

import models
import pytest
import torch

from fxpipe.capture import capture
from fxpipe.costs.whole import whole_ms
from fxpipe.runtime.device_names import parse_devices


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
def test_a_whole_forward_and_backward_take_time_and_leave_no_trace(devices):
    model, x = models.Norms().train(), torch.randn(4, 3, 8, 8)
    captured = capture(model, (x,), {})
    assert all(ms > 0 for ms in whole_ms(captured, [x], parse_devices(devices)))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.bn.num_batches_tracked == 0


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_a_hook_makes_of_parameters_is_no_part_of_it():
    model, x = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()), torch.randn(4, 6)
    torch.nn.utils.weight_norm(model[0])  # leaves a tensor with a graph on the module
    captured = capture(model, (x,), {})
    assert all(ms > 0 for ms in whole_ms(captured, [x], parse_devices("cpu*2")))


def test_it_draws_as_stages_do():
    """From streams of its own: what that takes is part of a stage's forward."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5))
    captured = capture(model, (torch.randn(4, 6),), {})
    before = torch.get_rng_state()
    whole_ms(captured, [torch.randn(4, 6, generator=torch.Generator())], parse_devices("cpu*2"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("apart", [False, True])
def test_every_lane_is_busy_unless_each_is_a_process(apart):
    seen = set()

    class Spy(torch.nn.Module):
        def forward(self, x):
            seen.add(threading.current_thread().name)
            return x

    model, x = models.Chain(), torch.randn(8, 6)
    captured = capture(model, (x,), {})
    node = next(node for node in captured.graph.nodes if node.op == "call_module")
    spied = {**captured.modules, str(node.target): Spy()}
    object.__setattr__(captured, "modules", spied)
    whole_ms(captured, [x], parse_devices("cpu*2"), apart=apart)
    own = threading.current_thread().name
    assert seen == {own} | (set() if apart else {"fxpipe lane 1"})


class Noted(torch.autograd.Function):
    """Notes in `notes` when it runs, and when its backward does."""

    notes: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx, x):
        Noted.notes.append("F")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Noted.notes.append("B")
        return gradient


def test_other_micro_batches_come_between_a_forward_and_its_backward():
    class Noting(torch.nn.Module):
        def forward(self, x):
            return Noted.apply(x)

    model, x = models.Chain(), torch.randn(8, 6)
    captured = capture(model, (x,), {})
    node = next(node for node in captured.graph.nodes if node.op == "call_module")
    noting = {**captured.modules, str(node.target): Noting()}
    object.__setattr__(captured, "modules", noting)
    given = x.requires_grad_()
    Noted.notes.clear()
    whole_ms(captured, [given], parse_devices("cpu"))
    first, *steady = "".join(Noted.notes).split("B")
    assert first == "F"  # to warm up
    assert steady[0] == "FFF"
    assert all(steady[1:-1])


class Once(torch.autograd.Function):
    """Multiplies, with a backward that runs once."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.was_run = False
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        if ctx.was_run:
            raise RuntimeError("a second time")
        ctx.was_run = True
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


def test_a_backward_that_can_not_be_halved_is_timed_whole():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(6))

        def forward(self, x):
            return Once.apply(x, self.weight)

    model, x = models.Chain(), torch.randn(8, 6)
    captured = capture(model, (x,), {})
    node = [node for node in captured.graph.nodes if node.op == "call_module"][1]
    refusing = {**captured.modules, str(node.target): Scale()}
    object.__setattr__(captured, "modules", refusing)
    found = whole_ms(captured, [x], parse_devices("cpu"))
    assert found.halves_ms == inf
    assert 0 < found.backward_ms < inf
