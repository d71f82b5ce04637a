"""A program of which one part is pipelined: a frozen encoder before it, a head after it.

python examples/partial.py

The body is given to `torch.compile` with fxpipe as its backend; the rest stays as it is. A runner
calls the closure below once per micro-batch and overlaps them in the pipeline. At the end the
plain program trains in the same way, without a pipeline, and both are compared.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe

MICROBATCHES = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Program(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 32).requires_grad_(False)
        self.body = nn.Sequential(*(Block(32) for _ in range(6)))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        if x.mean() > 0:  # no pipeline could hold a branch on a value: it stays outside
            x = -x
        return self.head(self.body(x))


def main() -> None:
    torch.manual_seed(0)
    plain = Program().double()
    program = copy.deepcopy(plain)
    program.body = torch.compile(
        program.body,
        backend="fxpipe",
        options={"devices": "cpu*2", "microbatches": MICROBATCHES, "out": "build/body"},
    )
    runner = fxpipe.Runner(MICROBATCHES)

    def closure(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(program(x), labels)
        (loss * runner.share).backward()  # micro-batches add up to the mean over the batch
        return loss.detach() * runner.share

    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in (program, plain)]
    for step in range(5):
        x, labels = torch.randn(10, 16).double(), torch.randint(4, (10,))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum(runner.step(closure, x, labels))
        for rows, wanted in zip(
            x.tensor_split(MICROBATCHES), labels.tensor_split(MICROBATCHES), strict=True
        ):
            (F.cross_entropy(plain(rows), wanted) * len(rows) / len(x)).backward()
        for optimizer in optimizers:
            optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}")

    pairs = zip(program.parameters(), plain.parameters(), strict=True)
    apart = max((mine - theirs).abs().max().item() for mine, theirs in pairs)
    print(f"parameters differ from the plain program's by at most {apart:.1e}")


if __name__ == "__main__":
    main()
