"""Stage 0 of 2 of Tied, written by fxpipe.

Takes tokens: int64[batch, length] from the caller
Returns x: float32[batch, length, 6]
"""

from torch import Tensor, nn


class Stage0(nn.Module):
    """3 ops, from embed to body.1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.ModuleList([nn.Linear(6, 6), nn.GELU()])

    def forward(self, tokens: Tensor) -> Tensor:
        # models.py
        embed = self.embed(tokens)  # line 64: float32[batch, length, 6]
        return self.body[1](self.body[0](embed))  # line 64
