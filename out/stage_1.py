"""Stage 1 of 2 of Hook, written by fxpipe.

Takes linear: float64[batch, 4] from stage 0
Returns output: float64[batch, 4]
"""

import torch
from torch import Tensor, nn


class Stage1(nn.Module):
    """1 op, in c."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, linear: Tensor) -> Tensor:
        # t.py
        # line 51: def forward(s,x): return s.c(s.a(x))
        return self.c(linear)  # float64[batch, 4]
