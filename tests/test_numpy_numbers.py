"""Numpy's numbers in a model are numbers, as they are to torch."""

import math

import numpy as np
import pytest
import torch
from flat import verified
from torch import nn

from fxpipe.capture import capture
from fxpipe.errors import CaptureError


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.pool = nn.AvgPool1d((np.int64(2),), stride=np.int64(1))
        self.head = nn.Linear(7, 4)
        self.scale = np.sqrt(8)
        self.shape = (2, np.int64(4))
        self.sizes = {"times": [np.int32(2)]}

    def forward(self, x):
        parts = self.mix(x).view(-1, *self.shape) / self.scale
        whole = parts.view(-1, int(np.prod(self.shape)))
        steps = torch.arange(8, device=x.device) * -(np.log(10000.0) / 7)
        whole = whole.repeat_interleave(int(self.sizes["times"][0]), 1)[:, ::2] + steps.exp()
        return self.head(self.pool(whole))


def test_a_model_may_hold_and_compute_them(tmp_path):
    package = verified(Scaled, lambda rows: {"x": torch.randn(rows, 8)}, tmp_path)
    text = "".join(package.files.values())
    assert "np." not in text
    assert str(math.sqrt(8)) in text


def test_it_still_holds_them_afterwards():
    model = Scaled()
    held = {name: type(value) for name, value in vars(model).items()}
    capture(model, (torch.randn(4, 8),), {})
    assert {name: type(value) for name, value in vars(model).items()} == held
    assert type(model.shape[1]) is np.int64
    assert type(model.pool.stride[0]) is np.int64


def test_numbers_that_are_drawn_are_not_taken_for_one_that_stays():
    class Draws(nn.Module):
        def forward(self, x):
            return x * np.random.choice([2, 3])

    with pytest.raises(CaptureError, match=r"at .*np\.random\.choice"):
        capture(Draws(), (torch.randn(4, 8),), {})


def test_arrays_are_refused():
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.sizes = np.array([3, 5])

        def forward(self, x):
            return x[:, : self.sizes[0]]

    with pytest.raises(CaptureError, match="computes with arrays of numpy"):
        capture(Sliced(), (torch.randn(4, 8),), {})


class Ordered(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.order = np.array([3, 1, 2, 0, 5, 4, 7, 6])

    def forward(self, x):
        return self.mix(x)[:, self.order]


def test_arrays_as_indices_are_refused():
    with pytest.raises(CaptureError, match=r"an attribute is one.*torch\.from_numpy"):
        capture(Ordered(), (torch.randn(4, 8),), {})
