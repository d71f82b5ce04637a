"""Gradients of weights that are added straight to `.grad` are those that autograd adds."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe.runtime.weight_gradients import add_directly


class Product(nn.Module):
    """A linear layer whose weight has a row for each input, as GPT-2's have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class ProductAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 3),
    "linear without bias": lambda: nn.Linear(5, 3, bias=False),
    "product": Product,
    "product without bias": ProductAlone,
    "layer norm": lambda: nn.LayerNorm(5),
    "layer norm without bias": lambda: nn.LayerNorm(5, bias=False),
    "convolution": lambda: nn.Conv2d(5, 4, 3, stride=2, padding=1),
    "convolution without bias": lambda: nn.Conv2d(5, 4, (1, 3), dilation=2, bias=False),
    "grouped convolution": lambda: nn.Conv2d(5, 10, 3, groups=5),
    "transposed convolution": lambda: nn.ConvTranspose2d(5, 4, 3, stride=2, output_padding=1),
    "batch norm": lambda: nn.BatchNorm2d(5),
    "batch norm in eval": lambda: nn.BatchNorm2d(5).eval(),
}
IMAGES = {kind for kind in LAYERS if "convolution" in kind or "batch" in kind}
NODES = (
    "AddmmBackward0",
    "MmBackward0",
    "NativeLayerNormBackward0",
    "ConvolutionBackward0",
    "NativeBatchNormBackward0",
)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def added(output: Tensor, gradient: Tensor, weights: list[Tensor]) -> bool:
    """`add_directly` to the first node below `output` that it is about."""
    node = output.grad_fn
    while node.name() not in NODES:
        node = node.next_functions[0][0]
    return add_directly(node, [gradient], weights)


def whole(layer: nn.Module, inputs: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    layer.zero_grad()
    for x, gradient in zip(inputs, gradients, strict=True):
        layer(x).backward(gradient)
    return [p.grad.clone() for p in layer.parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("kind", "frozen"),
    [
        *((kind, None) for kind in LAYERS),
        *(
            (kind, name)
            for kind in ("linear", "product", "layer norm", "convolution", "batch norm")
            for name in ("weight", "bias")
        ),
    ],
)
def test_they_add_up_as_autograds_do(kind, frozen):
    layer = LAYERS[kind]().double()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name != frozen)
    weights = [p for p in layer.parameters() if p.requires_grad]
    shape = (4, 5, 8, 8) if kind in IMAGES else (4, 5)
    inputs = [random(*shape).requires_grad_() for _ in range(3)]
    gradients = [random(*layer(x).shape) for x in inputs]
    expected = whole(layer, inputs, gradients)

    layer.zero_grad()
    for x, gradient in zip(inputs, gradients, strict=True):
        assert added(layer(x), gradient, weights)

    for parameter, total in zip(weights, expected, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-12, atol=1e-12)


def test_a_batch_of_sequences_is_one_matrix():
    linear, x, gradient = nn.Linear(5, 3).double(), random(2, 4, 5).requires_grad_(), random(8, 3)
    expected = whole(linear, [x], [gradient.view(2, 4, 3)])
    linear.zero_grad()

    assert added(linear(x), gradient, [*linear.parameters()])
    for parameter, total in zip(linear.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-12, atol=1e-12)


def test_later_ones_are_added_in_place():
    linear = nn.Linear(5, 3)
    for _ in range(2):
        assert added(linear(torch.ones(4, 5)), torch.ones(4, 3), [*linear.parameters()])
        held = [p.grad.data_ptr() for p in linear.parameters()]
    assert added(linear(torch.ones(4, 5)), torch.ones(4, 3), [*linear.parameters()])
    assert [p.grad.data_ptr() for p in linear.parameters()] == held


def weight_first(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.addmm(linear.bias, linear.weight, x)


def weight_made_of_others(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight * 2, linear.bias)


def scaled(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.addmm(linear.bias, x, linear.weight.t(), alpha=2)


def bias_for_each_row(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.addmm(linear.bias.view(5, 1), x, linear.weight.t())


def bias_of_one(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.addmm(linear.bias[:1], x, linear.weight.t())


def in_autocast(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(x)


@pytest.mark.parametrize(
    "run",
    [weight_first, weight_made_of_others, scaled, bias_for_each_row, bias_of_one, in_autocast],
)
def test_what_is_no_plain_layer_is_left_to_autograd(run):
    linear = nn.Linear(5, 5)
    output = run(linear, torch.ones(5, 5, requires_grad=True))

    assert not added(output, torch.ones_like(output), [*linear.parameters()])
    assert all(p.grad is None for p in linear.parameters())


def test_nothing_is_added_in_autocast():
    """The products would be those of another dtype."""
    linear = nn.Linear(5, 5)
    output = linear(torch.ones(5, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not added(output, torch.ones_like(output), [*linear.parameters()])


@pytest.mark.parametrize(
    "watch", [nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook]
)
def test_who_watches_a_gradient_sees_it(watch):
    linear = nn.Linear(5, 5)
    watch(linear.weight, lambda _: None)
    output = linear(torch.ones(5, 5))
    assert not added(output, torch.ones_like(output), [*linear.parameters()])
