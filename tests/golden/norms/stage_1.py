"""Stage 1 of 2 of Norms, written by fxpipe.

Takes x: float32[batch, 4, height, width] from stage 0
Returns output: float32[batch, 2]
"""

from torch import Tensor, nn
from torch.nn import functional as F


class Stage1(nn.Module):
    """3 ops, in head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        # models.py
        x = F.dropout(x, p=0.25, training=self.training)  # line 49
        return self.head(x.mean((2, 3)))  # line 50: float32[batch, 2]
