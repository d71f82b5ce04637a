"""Stage 0 of 2 of Paths, written by fxpipe.

Takes x: float32[batch, 6] from the caller
Returns x: float32[batch, 6]
"""

import torch
from torch import Tensor, nn


class Stage0(nn.Module):
    """8 ops, in a."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size(0)

        # models.py
        y = self.a(x)  # line 114: float32[batch, 6]
        if self.training:
            y_2 = y * (torch.rand(batch, 1, dtype=y.dtype) > 0.25) / 0.75  # line 116
        # line 116: y = y * (torch.rand(y.size(0), 1, dtype=y.dtype) > 0.25) / 0.75
        y = y_2 if self.training else y
        return x + y  # line 117
