"""A backward in two halves gives what the whole gives, each half its part."""

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from fxpipe.runtime.split import SplitBackward


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Shared(nn.Module):
    """A convolution's weight has no node of its own before the convolutions that use it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.unsqueeze(2))
        return self.conv(torch.tanh(x)).squeeze(2)


class Normed(nn.Module):
    """One weight, made of two parameters, is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        return F.linear(torch.tanh(F.linear(x, weight)), weight, self.linear.bias)


class Beside(nn.Module):
    """An output that no input leads to, and an input that leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear(self.table).tanh()


class Written(nn.Module):
    """The input is written in place, and comes out too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        y[:, :2].mul_(self.scale[:2])
        return y * self.scale, x


class ChannelsLast(nn.Module):
    """A group norm on channels-last memory writes its input's gradient, asked or not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        image = torch.stack([x, x.tanh()], 2).unsqueeze(3).to(memory_format=torch.channels_last)
        self.image = image
        return self.norm(image)[:, :, 0, 0]


def backward(model: nn.Module, n_inputs: int, half: bool) -> list[Tensor | None]:
    """The gradients of inputs and weights."""
    generator = torch.Generator().manual_seed(0)
    model.zero_grad()
    leaves = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(n_inputs)]
    inputs = [leaf.requires_grad_().view_as(leaf) for leaf in leaves]
    begins = [get_gradient_edge(x) for x in inputs]
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [torch.randn(3 if o.size(0) == 3 else 4, 4).double() for o in outputs]
    if not half:
        torch.autograd.backward(outputs, gradients)
        return [*(leaf.grad for leaf in leaves), *(p.grad for p in model.parameters())]
    split = SplitBackward([get_gradient_edge(output) for output in outputs], gradients)
    found = split.input_gradients(begins)
    assert all(p.grad is None for p in model.parameters())
    split.weight_gradients()
    return [*found, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("model", "n_inputs"),
    [(Chain, 1), (Shared, 1), (Normed, 1), (Beside, 2), (Written, 1), (ChannelsLast, 1)],
)
def test_two_halves_are_the_whole(model, n_inputs):
    torch.manual_seed(0)
    built = model().double()
    torch.manual_seed(1)
    whole = backward(built, n_inputs, half=False)
    whole = [None if g is None else g.clone() for g in whole]
    torch.manual_seed(1)
    halves = backward(built, n_inputs, half=True)

    for a, b in zip(whole, halves, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_written_though_nobody_asked_is_not_kept():
    model = ChannelsLast().double()
    backward(model, 1, half=True)
    assert model.image.retains_grad
    assert model.image.grad is None


def test_without_inputs_all_is_left_for_the_second_half():
    linear = nn.Linear(4, 4)
    output = linear(torch.randn(3, 4))
    split = SplitBackward([get_gradient_edge(output)], [torch.ones(3, 4)])

    assert split.input_gradients([]) == []
    assert linear.weight.grad is None
    split.weight_gradients()
    assert linear.weight.grad is not None


def test_what_leads_to_weights_alone_lets_go_of_what_it_saved_on_its_way():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(3, 4)
    y = second(first(x).tanh()).tanh()
    split = SplitBackward([get_gradient_edge(y)], [torch.ones(3, 4)])
    saved = weakref.ref(y.untyped_storage())
    del y
    there = []
    for linear in (second, first):
        linear.weight.register_post_accumulate_grad_hook(lambda _: there.append(saved()))

    split.input_gradients([])
    assert saved() is not None
    split.weight_gradients()
    assert there == [None, None]


def test_the_first_half_computes_no_weights_gradient():
    """Each matrix product of a linear layer's backward is computed once in the two halves."""
    from torch.utils.flop_counter import FlopCounterMode

    model = Chain().double()
    x = torch.randn(3, 4, dtype=torch.float64).requires_grad_().view(3, 4)
    begin = [get_gradient_edge(x)]
    split = SplitBackward([get_gradient_edge(model(x))], [torch.ones(3, 4).double()])

    with FlopCounterMode(display=False) as first:
        split.input_gradients(begin)
    with FlopCounterMode(display=False) as second:
        split.weight_gradients()

    assert first.get_total_flops() == second.get_total_flops() == 2 * (2 * 3 * 4 * 4)


def test_what_waits_is_no_view_of_more():
    """The gradient of a part is a view of that of the whole, which is let go."""
    first, second = nn.Linear(4, 2), nn.Linear(4, 6)
    x = torch.randn(3, 4, requires_grad=True)
    joined = torch.cat((first(x), second(x)), dim=1)
    split = SplitBackward([get_gradient_edge(joined)], [torch.ones(3, 8)])

    split.input_gradients([get_gradient_edge(x)])
    held = sum(gradient.untyped_storage().nbytes() for gradient in split.waiting)
    assert held == 3 * (2 + 6) * 4
    split.weight_gradients()
    assert torch.equal(second.weight.grad, x.detach().sum(0).expand(6, 4))
