"""What the runtime adds to each action of a step, on CPU lanes: a step whose stages do nothing.

    python benchmarks/overhead.py

Each stage multiplies one number by one weight. A step's time over its number of actions (a forward
or a backward of one stage on one micro-batch, the loss included) is what an action costs the host;
beside it, what the plain model takes for the same work, micro-batch by micro-batch.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fxpipe

GOAL_US = 60


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def microseconds(run: Callable[[], object], repeats: int) -> float:
    """The median over `repeats` runs, after a few that warm up."""
    times = []
    for _ in range(5 + repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times[5:]) * 1e6


def measure(lanes: int, m: int, checkpoint: str, repeats: int) -> tuple[float, float]:
    """Microseconds per action of the pipeline and of the plain model."""
    model = nn.Sequential(*(Scale() for _ in range(lanes)))
    x = torch.randn(m, 1)
    with tempfile.TemporaryDirectory() as folder:
        package = fxpipe.compile(
            model, (x,), devices=["cpu"] * lanes, microbatches=m, checkpoint=checkpoint
        )
        pipe = fxpipe.load(package.write(f"{folder}/out"))

    def plain() -> None:
        for piece in x.split(1):
            loss_fn(model(piece), piece).backward()

    actions = 2 * lanes * m
    step = microseconds(lambda: pipe.step(x, target=x, loss_fn=loss_fn), repeats)
    return step / actions, microseconds(plain, repeats) / actions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"microseconds per action, 1f1b, {options.microbatches} micro-batches; goal {GOAL_US}")
    print("lanes  checkpoint   step  plain")
    for lanes in (1, 2, 4):
        for checkpoint in ("never", "always"):
            step, plain = measure(lanes, options.microbatches, checkpoint, options.repeats)
            print(f"{lanes:5}  {checkpoint:10}  {step:5.1f}  {plain:5.1f}")


if __name__ == "__main__":
    main()
