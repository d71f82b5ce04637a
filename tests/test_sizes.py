"""Sizes of inputs besides the batch stay open where the model takes any, and only there."""

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import InputError


class Reader(nn.Module):
    """Takes any even length up to 18; `fixed` ties it to the traced one."""

    def __init__(self, fixed=False):
        super().__init__()
        self.fixed = fixed
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("place", torch.randn(12, 8))

    def forward(self, tokens):
        batch, length = tokens.shape
        x = self.embed(tokens)
        if length > 18:
            return self.head(x)
        if self.fixed:
            x = x + self.place
        x = self.mix(x.view(batch, length // 2, 2, 8)).reshape(batch, length, 8)
        return self.head(x.cumsum(1) / length)


def compiled(model):
    tokens = torch.randint(20, (4, 12))
    package = fxpipe.compile(model, (tokens,), devices="cpu*2", microbatches=2)
    return package


def test_another_length_gives_the_models_own_numbers(tmp_path):
    model = Reader().double()
    package = compiled(model)
    assert dict(package.manifest.sizes) == {"length": 12}
    pipe = fxpipe.load(package.write(tmp_path / "out")).double()
    pipe.load_state_dict(model.state_dict())
    for length in (4, 16):
        tokens = torch.randint(20, (5, length))
        torch.testing.assert_close(pipe(tokens), model(tokens), rtol=0, atol=1e-12)


def test_sizes_that_forward_adds_nothing_to_are_left_open():
    class Padded(Reader):
        def forward(self, tokens):
            return self.head(self.embed(tokens) / (tokens.size(1) + 0))

    assert dict(compiled(Padded()).manifest.sizes) == {"length": 12}


def test_a_length_for_which_forward_takes_another_path_is_refused(tmp_path):
    pipe = fxpipe.load(compiled(Reader()).write(tmp_path / "out"))
    with pytest.raises(InputError, match=r"length <= 18, found length 20"):
        pipe(torch.randint(20, (4, 20)))


def test_a_length_that_the_model_fixes_is_a_number(tmp_path):
    package = compiled(Reader(fixed=True))
    assert package.manifest.sizes == {}
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    with pytest.raises(InputError, match=r"must have shape \[batch, 12\], found \[4, 10\]"):
        pipe(torch.randint(20, (4, 10)))
