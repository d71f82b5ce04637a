"""Where forward mixes rows of the batch, of which a micro-batch has a part, it is told."""

import re
import warnings

import models
import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.errors import MixedRowsWarning


class Centered(models.Chain):
    def step(self, h):
        return h - h.mean(0)


class Rolled(models.Chain):
    def step(self, h):
        return h + h.roll(1, 0)


class Halved(models.Chain):
    """No row's output hangs on another's, but on its place in the batch."""

    def step(self, h):
        first, second = h.chunk(2)
        return torch.cat([first, 2 * second])


class Across(models.Chain):
    """In a layout with the batch in dimension 1."""

    def step(self, h):
        return h.T.softmax(1).T


class Behind(models.Chain):
    """First there is another order of rows and places, which is no mixing."""

    def step(self, h):
        h = h.view(-1, 2, 3).transpose(0, 1).flatten(0, 1).relu()
        h = h.unflatten(0, (2, -1)).transpose(0, 1).flatten(1)
        return h - h.mean(0)


class Masked(models.Chain):
    """Where other numbers are small beside those of a mask."""

    def forward(self, x):
        h = self.layers(x)
        h = h - h.mean(0)
        return h.masked_fill(torch.arange(6) > 3, -1e9)


class Turned(models.Chain):
    """With the batch in dimension 1 of the output."""

    def forward(self, x):
        h = self.layers(x)
        h = h - h.mean(0)
        return h.T


class Selected(models.Chain):
    def step(self, h):
        return h.index_fill(1, torch.tensor([0]), 1.0).sort(1).values


class Scaled(models.Chain):
    def step(self, h):
        return h / h.norm(dim=1, keepdim=True)


class Normed(models.Chain):
    """In train mode alone."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def step(self, h):
        return self.norm(h)


class Noisy(models.Chain):
    """Rows differ from one run to the next."""

    def step(self, h):
        return h + torch.rand_like(h)


class PlaceByPlace(models.Chain):
    def forward(self, x):
        return self.layers(x).view(-1, 2, 3).transpose(0, 1).flatten(0, 1)


def with_forward(kind):
    if "forward" in vars(kind):
        return kind()

    class Model(kind):
        def forward(self, x):
            return self.layers[2:](self.step(self.layers[:2](x)))

    return Model()


X = torch.randn(8, 6)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Centered, "return h - h.mean(0)"),
        (Rolled, "return h + h.roll(1, 0)"),
        (Halved, "return torch.cat([first, 2 * second])"),
        (Across, "return h.T.softmax(1).T"),
        (Behind, "return h - h.mean(0)"),
        (Masked, "h = h - h.mean(0)"),
        (Turned, "h = h - h.mean(0)"),
    ],
)
def test_the_line_that_mixes_rows_is_named(kind, line):
    found = capture(with_forward(kind), (X,), {}).mixed
    assert re.fullmatch(rf"test_mixed_rows.py, line \d+: {re.escape(line)}", found)


@pytest.mark.parametrize("kind", [Selected, Scaled, Normed, Noisy, PlaceByPlace])
def test_of_what_keeps_rows_apart_nothing_is_said(kind):
    assert capture(with_forward(kind), (X,), {}).mixed == ""


def test_it_is_warned_of_unless_the_batch_stays_whole():
    model = with_forward(Centered)
    with pytest.warns(MixedRowsWarning, match=r": return h - h.mean\(0\): .*or compile with"):
        fxpipe.compile(model, (X,), devices=2, microbatches=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxpipe.compile(model, (X,), devices=2, microbatches=1)
