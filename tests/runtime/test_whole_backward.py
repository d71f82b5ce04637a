"""A backward that adds to large weights' gradients gives what autograd's own does."""

import gc
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from toys import CHAIN, SKIPS, TIED, assert_same_state, both, mean_loss, plain_step

from fxpipe.runtime import whole_backward


@pytest.fixture(autouse=True)
def _any_weight_is_large(monkeypatch):
    monkeypatch.setattr(whole_backward, "_LARGE_BYTES", 1)


class Ops(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh())


class WithoutBias(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.second.weight.new_ones(4, 4)


class Shared(Layers):
    """A weight is used twice, and one of another layer in another way too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(super().forward(x)) * self.third.weight.sum()


class Tables(Layers):
    """Layers that no input leads to, and a product of two weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.second.weight.mm(self.first.weight).sum(0)


class Made(Layers):
    """A weight is made of another, and one is to the left."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(super().forward(x), self.first.weight * 2, self.second.bias)
        return torch.mm(nn.functional.pad(self.third.weight, (0, 0, 0, len(y) - 4)), y.t()[:4, :4])


class Frozen(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight.requires_grad_(False)
        self.third.bias.requires_grad_(False)


class Reentrant(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.third(checkpoint(self.second, self.first(x), use_reentrant=True))


class Watched(Layers):
    """Somebody doubles a gradient before it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight.register_hook(lambda gradient: gradient * 2)


def gradients(model: nn.Module, backward, wants_input: bool) -> list[Tensor | None]:
    """Of the input and of the weights, two micro-batches added up."""
    torch.manual_seed(1)
    model.zero_grad()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=wants_input)
    for scale in (1, 2):
        y = model(x * scale)
        backward([get_gradient_edge(y)], [torch.randn_like(y)])
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("wants_input", [True, False])
@pytest.mark.parametrize(
    "kind", [Layers, WithoutBias, Shared, Tables, Made, Frozen, Reentrant, Watched]
)
def test_gradients_are_those_of_autograd(kind, wants_input):
    model = kind().double()
    expected = gradients(model, torch.autograd.backward, wants_input)
    expected = [None if gradient is None else gradient.clone() for gradient in expected]
    found = gradients(model, whole_backward.whole_backward, wants_input)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_products_that_an_input_leads_to_are_added_in_place():
    model = Layers().double()
    gradients(model, whole_backward.whole_backward, wants_input=True)
    held = [p.grad.data_ptr() for p in model.parameters()]
    y = model(torch.randn(5, 4, dtype=torch.float64))  # an input that wants none
    with Ops() as ops:
        whole_backward.whole_backward([get_gradient_edge(y)], [torch.ones_like(y)])

    # Two gradients of inputs, and that of the first weight, which autograd adds by itself.
    assert ops.seen["addmm_"] == 2
    assert ops.seen["mm"] == 3
    assert [p.grad.data_ptr() for p in model.parameters()] == held


def test_smaller_weights_are_left_to_autograd(monkeypatch):
    model = Layers()
    of_small = nn.Linear(3, 4, bias=False)
    monkeypatch.setattr(whole_backward, "_LARGE_BYTES", 4 * 4 * 4)
    assert whole_backward.backward_of(model.parameters()) is whole_backward.whole_backward
    assert whole_backward.backward_of(of_small.parameters()) is whole_backward.backward
    y = of_small(torch.ones(2, 3, requires_grad=True))
    edges = [get_gradient_edge(y), get_gradient_edge(model(y))]
    weights = [*of_small.parameters(), *model.parameters()]
    assert whole_backward.added_bytes(edges, weights) == 3 * 4 * 4 * 4
    assert whole_backward.added_bytes(edges, [model.second.weight]) == 4 * 4 * 4


class Token:
    """What a node of the graph holds."""


class Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, fails):
        ctx.token, ctx.fails = token, fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ValueError("on its way")
        return gradient, None, None


@pytest.mark.parametrize("fails", [False, True])
def test_the_graph_is_let_go_without_the_collector(fails):
    model, token = Layers(), Token()
    alive = weakref.ref(token)
    y = model.third(Between.apply(model.second(torch.ones(5, 4)), token, fails))
    edges = [get_gradient_edge(y)]
    del y, token
    gc.disable()
    try:
        with pytest.raises(ValueError, match="on its way") if fails else nullcontext():
            whole_backward.whole_backward(edges, [torch.ones(5, 4)])
        del edges
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("schedule", ["1f1b", "split"])
@pytest.mark.parametrize("toy", [CHAIN, SKIPS, TIED])
def test_a_step_is_the_models(tmp_path, toy, schedule):
    model, pipe = both(tmp_path, toy, schedule=schedule)
    for batch in (8, 5):
        x = toy.inputs(batch)
        pipe.step(*x, loss_fn=mean_loss)
        plain_step(toy, model, x, 4)
    assert_same_state(pipe, model)
