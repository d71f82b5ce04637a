"""Stage 2 of 3 of Skip, written by fxpipe.

Takes x: float32[batch, 6] from stage 1
Takes skip: float32[batch, 6] from stage 0 (portal)
Returns output: float32[batch, 3]
"""

import torch
from torch import Tensor, nn


class Stage2(nn.Module):
    """2 ops, in last."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        # models.py
        return self.last(torch.cat([x, skip], dim=1))  # line 33: float32[batch, 3]
