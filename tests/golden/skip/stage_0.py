"""Stage 0 of 3 of Skip, written by fxpipe.

Takes x: float32[batch, 6] from the caller
Returns skip: float32[batch, 6]
Returns x: float32[batch, 6]
"""

from torch import Tensor, nn


class Stage0(nn.Module):
    """2 ops, from first to middle.0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.ModuleList([nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # models.py
        skip = self.first(x)  # line 31: float32[batch, 6]
        x = self.middle[0](skip)  # line 32
        return skip, x
