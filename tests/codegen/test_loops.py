"""Loops over lists of modules: which calls may be one, and how it begins."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpipe


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.q(query)) + 2 * self.k(key)
        return out


class _Model(nn.Module):
    """Each layer takes the result of the one before twice; the first takes what `apart` says."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mixed = _Block()
        self.layers = nn.ModuleList(_Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.a(x), self.b(x)
        mixed = self.mixed(query, key)
        if not self.apart:
            query = key = mixed
        for layer in self.layers:
            query = key = layer(query, key)
        return query + mixed


@pytest.mark.parametrize("apart", [True, False])
def test_one_result_may_be_two_arguments(tmp_path: Path, apart: bool) -> None:
    torch.manual_seed(0)
    plain, x = _Model(apart).double(), torch.randn(4, 4).double()
    package = fxpipe.compile(copy.deepcopy(plain), (x,), devices=["cpu"], microbatches=2)
    pipe = fxpipe.load(package.write(tmp_path / "out", weights=True))
    pipe.step(x, target=x, loss_fn=nn.functional.mse_loss)
    nn.functional.mse_loss(plain(x), x).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
    code = (tmp_path / "out" / "stage_0.py").read_text()
    assert re.search(r"for layer in self\.layers", code)
    assert not re.search(r"(\w+), \1 = ", code)
