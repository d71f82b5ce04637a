"""Stock modules are written as their own constructor call, and only if it rebuilds them."""

import pytest
import torch
from torch import nn

from fxpipe.ops.stock import constructor


@pytest.mark.parametrize(
    "text",
    [
        "nn.Conv2d(3, 64, 3, padding=1, bias=False)",
        "nn.Conv2d(3, 64, (3, 5), padding='same')",
        "nn.Conv1d(4, 8, 3, stride=2, dilation=2, padding_mode='circular')",
        "nn.Linear(3, 4, bias=False, dtype=torch.float64)",
        "nn.BatchNorm2d(4)",
        "nn.BatchNorm2d(4, momentum=None, affine=False)",
        "nn.InstanceNorm2d(3)",
        "nn.LayerNorm((3, 4), eps=1e-06, bias=False)",
        "nn.GroupNorm(4, 16)",
        "nn.Embedding(10, 4, padding_idx=0)",
        "nn.Dropout(0.1)",
        "nn.ReLU(inplace=True)",
        "nn.Tanh()",
        "nn.GELU(approximate='tanh')",
        "nn.Softmax(dim=-1)",
        "nn.MaxPool2d(2)",
        "nn.MaxPool2d(3, stride=2, padding=1)",
        "nn.AdaptiveAvgPool2d((None, 7))",
        "nn.Upsample(scale_factor=2.0, mode='bilinear', align_corners=True)",
    ],
)
def test_the_shortest_call_that_rebuilds_the_module(text):
    assert constructor(eval(text)) == text


class Shift(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 3, kernel_size=1)


def test_a_class_with_but_a_constructor_of_its_own_is_that_of_torch():
    assert constructor(Shift()) == "nn.Conv2d(3, 3, 1)"


class Mine(nn.Linear):
    def forward(self, input):
        return super().forward(input)


class Noted(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.scale = 3  # which nobody knows what reads


def hooked():
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    return module


def changed():
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.ones(3, 2))
    return module


def normed():
    return nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))


@pytest.mark.parametrize("make", [lambda: Mine(2, 2), Noted, hooked, changed, normed])
def test_a_module_that_is_more_than_its_constructor_is_not_stock(make):
    assert constructor(make()) is None
