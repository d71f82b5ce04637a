"""Calls that take one result twice, after a first one that takes two values."""

from pathlib import Path

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
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(_Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.a(x), self.b(x)
        for layer in self.layers:
            query = key = layer(query, key)
        out: Tensor = query
        return out


def test_two_values_are_not_one_variable(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = _Model().double(), torch.randn(4, 4).double()
    package = fxpipe.compile(model, (x,), devices=["cpu"], microbatches=2)
    pipe = fxpipe.load(package.write(tmp_path / "out", weights=True))
    with torch.no_grad():
        assert torch.equal(pipe(x), model(x))
