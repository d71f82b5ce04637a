"""Stage 0 of 2 of Norms, written by fxpipe.

Takes x: float32[batch, 3, height, width] from the caller
Returns x: float32[batch, 4, height, width]
"""

import torch
from torch import Tensor, nn


class Stage0(nn.Module):
    """4 ops, from conv to relu."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        # models.py
        return self.relu(self.bn(self.conv(x))) * self.scale  # line 48
