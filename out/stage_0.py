"""Stage 0 of 2 of Hook, written by fxpipe.

Takes x: float64[batch, 4] from the caller
Returns linear: float64[batch, 4]
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Stage0(nn.Module):
    """2 ops, from a.parametrizations.weight.0 to a."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Module()
        self.a.bias = nn.Parameter(torch.randn(4, dtype=torch.float64) * 0.3)
        self.a.parametrizations = nn.Module()
        self.a.parametrizations.weight = nn.Module()
        self.a.parametrizations.weight.original1 = nn.Parameter(
            torch.randn(4, 4, dtype=torch.float64) * 0.3
        )
        self.a.parametrizations.weight.original0 = nn.Parameter(
            torch.randn(4, 1, dtype=torch.float64) * 0.1
        )

    def forward(self, x: Tensor) -> Tensor:
        # a.parametrizations.weight.0 in t.py
        # line 51: def forward(s,x): return s.c(s.a(x))
        x_2 = torch._weight_norm(
            self.a.parametrizations.weight.original1,
            self.a.parametrizations.weight.original0,
            0,
        )

        # a in t.py
        # line 51: def forward(s,x): return s.c(s.a(x))
        return F.linear(x, x_2, self.a.bias)  # float64[batch, 4]
