"""Repeated modules: their classes compute what each of the modules does."""

import torch
from flat import compile_flat
from torch import nn

import fxpipe


def test_a_variable_may_be_called_as_the_parameter_it_is_made_from(tmp_path):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            weight = self.weight.transpose(0, 1)
            return x @ weight + weight.sum()

    model, x = nn.Sequential(Turned(), Turned()), torch.randn(4, 6)
    package = compile_flat(model, (x,), devices="cpu*1", microbatches=2)
    assert "weight = self.weight.transpose(0, 1)" in package.files["blocks.py"]
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    torch.testing.assert_close(pipe(x), model(x))
