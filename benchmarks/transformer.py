"""Transformer blocks, the work on which benchmarks compare pipelines."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and two linear layers, each after a norm and beside a skip."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(4, hidden // 64)
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def blocks(hidden: int, layers: int) -> nn.Sequential:
    """`layers` blocks; the same ones in each process."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(hidden) for _ in range(layers)))


def batch(hidden: int, rows: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (rows, sequence, hidden) both; the same ones in each process."""
    torch.manual_seed(1)
    return torch.randn(rows, sequence, hidden), torch.randn(rows, sequence, hidden)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)
