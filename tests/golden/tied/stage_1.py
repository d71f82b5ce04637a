"""Stage 1 of 2 of Tied, written by fxpipe.

Takes x: float32[batch, length, 6] from stage 0
Returns output: float32[batch, length, 11]
"""

from torch import Tensor, nn


class Stage1(nn.Module):
    """2 ops, from body.2 to head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"2": nn.Linear(6, 6)})
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # models.py
        # line 64: return self.head(self.body(self.embed(tokens)))
        x = self.body["2"](x)  # float32[batch, length, 6]
        return self.head(x)  # line 64: float32[batch, length, 11]
