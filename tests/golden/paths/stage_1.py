"""Stage 1 of 2 of Paths, written by fxpipe.

Takes x: float32[batch, 6] from stage 0
Returns output: float32[batch, 3]
"""

from torch import Tensor, nn


class Stage1(nn.Module):
    """6 ops, from b to c."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        # models.py
        # line 118: x = x + self.b(x) if self.training else x - self.b(x).relu()
        b = self.b(x)  # float32[batch, 6]
        if self.training:
            x_2 = x + b  # line 118
        else:
            x = x - b.relu()  # line 118
        x = x_2 if self.training else x  # line 118
        return self.c(x)  # line 119: float32[batch, 3]
