"""Transformer blocks, the work on which benchmarks compare pipelines, and the table of times."""

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from markdown_table import table
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


class Workload(NamedTuple):
    """Hidden size, blocks, rows of a batch, sequence length, micro-batches."""

    hidden: int
    layers: int
    rows: int
    sequence: int
    m: int


WORKLOADS = (
    Workload(256, 8, 16, 128, 8),
    Workload(64, 16, 32, 32, 16),
    Workload(512, 8, 16, 128, 8),
)


def plain_step(model: nn.Module, x: Tensor, target: Tensor, m: int) -> float:
    """The plain model's training step, micro-batch by micro-batch; the loss."""
    total = 0.0
    for piece, wanted in zip(x.chunk(m), target.chunk(m), strict=True):
        loss = loss_fn(model(piece), wanted) / m
        loss.backward()
        total += loss.item()
    return total


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """How far the gradients found are from those expected, relative to the largest."""
    return max(
        ((gradient - expected[name]).abs().max() / expected[name].abs().max()).item()
        for name, gradient in found.items()
    )


def same(name: str, difference: float) -> None:
    """Raises SystemExit if numbers differ by more than rounding."""
    if not difference < 1e-4:
        raise SystemExit(f"{name} computes something else: relative difference {difference:.1e}")


def milliseconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3


Times = Mapping[Workload, Mapping[str, Sequence[float]]]


def tables(
    measured: Times, theirs: Collection[str], goals: Mapping[Workload, Sequence[float]]
) -> str:
    """Medians of what was measured, and the fastest: another's work only makes a step longer."""
    return (
        f"Medians:\n\n{time_table(measured, theirs, goals, statistics.median)}\n\n"
        f"The fastest of all turns:\n\n{time_table(measured, theirs, goals, min)}"
    )


def time_table(
    measured: Times,
    theirs: Collection[str],
    goals: Mapping[Workload, Sequence[float]],
    statistic: Callable[[Sequence[float]], float],
) -> str:
    """Milliseconds by workload and by who takes them, and ours by the best of `theirs`.

    1F1B on two devices can't be shorter than `limit`: plain, halved, and its bubble.
    """
    names = list(next(iter(measured.values())))
    ours = [name for name in names if name.startswith("fxpipe")]
    ratios = [f"{name} / best" for name in ours]
    heads = ["h, layers, batch, sequence, m", "limit", *names, *ratios, "goals"]
    rows = []
    for work, turns in measured.items():
        times = {name: statistic(found) for name, found in turns.items()}
        best = min(times[name] for name in theirs)
        limit = times["plain"] * (work.m + 1) / (2 * work.m)
        cells = [", ".join(map(str, work)), f"{limit:.0f}"]
        cells += [f"{times[name]:.0f}" for name in names]
        cells += [f"{times[name] / best:.2f}" for name in ours]
        rows.append([*cells, ", ".join(map(str, goals[work]))])
    return table(heads, rows)
