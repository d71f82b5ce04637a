"""Stage 1 of 3 of Skip, written by fxpipe.

Takes x: float32[batch, 6] from stage 0
Returns x: float32[batch, 6]
"""

from torch import Tensor, nn


class Stage1(nn.Module):
    """3 ops, from middle.1 to middle.3."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.ModuleDict(
            {"1": nn.Tanh(), "2": nn.Linear(6, 6), "3": nn.Tanh()}
        )

    def forward(self, x: Tensor) -> Tensor:
        # models.py
        # line 32: x = self.middle(skip)
        return self.middle["3"](self.middle["2"](self.middle["1"](x)))
