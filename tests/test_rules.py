"""Calls that Dynamo has no rule for, and that change nothing, do not stand in the way."""

import pytest
import torch
from torch import nn

from fxpipe.capture import capture


def asks_for_gradients(self, x):
    x = x[:, None]
    x.requires_grad = True
    return self.linear(x)


def draws_by_the_default_generator(self, x):
    return self.linear(x) + torch.randn((x.size(0), 2), generator=None)


def asks_torchscripts_way(self, x):
    return self.linear(x) if torch.jit.isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize(
    "forward", [asks_for_gradients, draws_by_the_default_generator, asks_torchscripts_way]
)
def test_it_is_captured(forward):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 2)

    Model.forward = forward
    assert capture(Model(), (torch.randn(4, 6),), {}).checked == "train and eval"
