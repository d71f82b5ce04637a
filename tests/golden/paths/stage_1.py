"""Stage 1 of 2 of Paths, written by fxpipe.

Takes x: float32[batch, 6] from stage 0
Takes linear: float32[batch, 6] from stage 0
Returns output: float32[batch, 3]
"""

from torch import Tensor, nn


class Stage1(nn.Module):
    """5 ops, in c."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(6, 3)

    def forward(self, x: Tensor, linear: Tensor) -> Tensor:
        # models.py:118 | x = x + self.b(x) if self.training else x - self.b(x).relu()
        if self.training:
            x_2 = x + linear  # float32[batch, 6]
        else:
            x = x - linear.relu()  # float32[batch, 6]
        x = x_2 if self.training else x  # float32[batch, 6]

        # models.py:119 | return self.c(x)
        output = self.c(x)  # float32[batch, 3]
        return output
