"""A module can be switched alone where its lines have a mode of their own; else that is refused."""

import pytest
import torch
from flat import compile_flat
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import InputError


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x):
        return F.dropout(self.drop(self.mix(x)), 0.5, self.training)


def loaded(model, tmp_path):
    package = compile_flat(model, (torch.randn(8, 6),), devices=2, microbatches=4)
    return fxpipe.load(package.write(tmp_path / "out"))


def test_lines_that_stand_in_a_stage_go_by_its_mode(tmp_path):
    pipe, x = loaded(nn.Sequential(Drops(), nn.Linear(6, 6)), tmp_path), torch.randn(8, 6)
    for mode in (True, False):
        pipe.train(mode)
        pipe(x)
        pipe.get_submodule("0").train(not mode)
        with pytest.raises(InputError, match=r"module '0' is in .* stage_\d\.py"):
            pipe(x)
    pipe.train().get_submodule("0.drop").eval()
    pipe(x)


def test_a_class_of_its_own_has_a_mode_of_its_own(tmp_path):
    pipe, x = loaded(nn.Sequential(*(Drops() for _ in range(4))), tmp_path), torch.randn(8, 6)
    for k in range(4):
        assert not torch.equal(pipe(x), pipe(x))
        pipe.get_submodule(str(k)).eval()
    assert torch.equal(pipe(x), pipe(x))
