"""Straight code computes what the model does in train mode."""

import copy

import models
import pytest
import torch
from torch import nn

from fxpipe.capture import capture
from fxpipe.costs.straight import straight


class Regions(nn.Module):
    """Under one grad mode after the other, with autocasts inside each other."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        with torch.no_grad():
            scale = self.linear(x).abs().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                z = self.linear(x) * scale
            y = y + self.linear(z)
        return self.linear(y.float()), y


class Halves(nn.Module):
    """Cuts its input in two before anything has a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        left, right = x.chunk(2, dim=1)
        return self.linear(left) + right


class Named(nn.Module):
    """Has names that a GraphModule, and its forward, have for themselves."""

    def __init__(self):
        super().__init__()
        self.graph = nn.Linear(6, 6)
        self.code = nn.Parameter(torch.ones(6))
        self.self = nn.Linear(6, 6)

    def forward(self, x):
        return self.self(self.graph(x)) * self.code + self.graph.bias


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Negative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return -x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Functions(nn.Module):
    """Calls gradients of its own making."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return Negative.apply(Cube.apply(self.linear(x)))


def run(model, *inputs):
    """What straight code returns, and what the model does."""
    captured = capture(model.train(), inputs, {})
    made = straight(captured, captured.modules, captured.state, torch.device("cpu"))
    kept = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    (*outputs,), first = made(*inputs)
    model.load_state_dict(kept)
    torch.manual_seed(0)
    expected = model(*inputs)
    return outputs, first, expected if isinstance(expected, tuple) else (expected,)


@pytest.mark.parametrize(
    "model",
    [models.Chain(), models.Skip(), models.Tied(), models.Paths(), Halves(), Named(), Functions()],
    ids=lambda model: type(model).__name__,
)
def test_it_computes_what_the_model_does(model):
    x = torch.randint(0, 6, (4, 6)) if isinstance(model, models.Tied) else torch.randn(4, 6)
    outputs, first, expected = run(model, x)
    assert [torch.equal(*pair) for pair in zip(outputs, expected, strict=True)] == [True]
    assert first.requires_grad


def test_each_op_is_under_its_own_grad_mode_and_autocast():
    outputs, first, expected = run(Regions(), torch.randn(4, 6))
    assert [out.dtype for out in outputs] == [torch.float32, torch.bfloat16]
    assert [torch.equal(*pair) for pair in zip(outputs, expected, strict=True)] == [True] * 2
    assert first.dtype == torch.bfloat16  # what is computed without gradients is none
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_what_eval_mode_alone_has_is_none():
    outputs, _, (answer,) = run(models.Auxiliary(), torch.randn(4, 6))
    assert outputs.pop() is None
    expected = (answer.logits, *answer.hidden)
    assert [torch.equal(*pair) for pair in zip(outputs, expected, strict=True)] == [True] * 3
