"""fxpipe against torchgpipe 0.0.7 on one GPU cut into four, side by side in one run.

    pip install torchgpipe==0.0.7 'fxpipe[virtual]'
    python benchmarks/gpu.py             print the table
    python benchmarks/gpu.py --write     and keep it in benchmarks/GPU.md

Both run on the virtual devices `cuda:0/4`, torchgpipe's compute streams being set to theirs; the
same model and batch, 8 micro-batches, SGD. Ours steps by 1F1B (or --schedule), theirs is called
and calls backward; plain is the model on one of the four. They take turns of several steps; rates
are the medians of turns, memory is the peak of the whole GPU.
"""

import argparse
import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformer
from common import GIB, example, machine, seconds
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.runtime.stream import current_stream, parse_devices

HERE = Path(__file__).parent
DEVICES = "cuda:0/4"
N, M = 4, 8


@dataclass(frozen=True)
class Work:
    """A model with a batch, how it runs, and the goal in samples per second.

    `balance` is how many layers of it as an nn.Sequential each of torchgpipe's stages has.
    """

    name: str
    build: Callable[[], nn.Module]
    balance: list[int]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    checkpoint: str
    capture: str | None
    goal: int


def unet(checkpoint: str, goal: int) -> Work:
    return Work(
        f"U-Net (5, 64), 192 x 192, batch 128, {checkpoint}",
        lambda: example("unet").UNet(n_blocks=5, channels=64),
        [34, 76, 70, 61],
        lambda: (torch.rand(128, 3, 192, 192), torch.ones(128, 1, 192, 192)),
        F.binary_cross_entropy_with_logits,
        checkpoint,
        None,
        goal,
    )


def blocks(
    hidden: int, sequence: int, rows: int, dtype: torch.dtype, capture: str | None, goal: int
) -> Work:
    def batch() -> tuple[Tensor, Tensor]:
        x, target = transformer.batch(hidden, rows, sequence)
        return x.to(dtype), target.to(dtype)

    how = "one CUDA graph" if capture else "eager"
    return Work(
        f"16 blocks, h={hidden}, sequence {sequence}, batch {rows}, {str(dtype)[6:]}, {how}",
        lambda: transformer.blocks(hidden, 16).to(dtype),
        [4, 4, 4, 4],
        batch,
        transformer.loss_fn,
        "never",
        capture,
        goal,
    )


WORKS = [
    unet("never", 300),
    unet("except_last", 210),
    blocks(2048, 1024, 32, torch.bfloat16, None, 105),
    blocks(1024, 512, 16, torch.bfloat16, "graph", 400),
]


def rate(
    model: nn.Module, backward: Callable[[], object], rows: int, steps: int
) -> tuple[float, float]:
    """Samples per second of training steps, and peak GiB; the GPU's cache is emptied before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    taken = seconds(step, steps)
    return rows / taken, torch.cuda.max_memory_allocated() / GIB


def measure(work: Work, peer: bool, options: Namespace) -> dict[str, tuple[float, float]]:
    """By who runs: the median rate and the peak GiB."""
    streams = [current_stream(device) for device in parse_devices(DEVICES)]
    x, target = (tensor.cuda() for tensor in work.batch())
    # Half of the batch, as compiling compares the graph with the whole model, on the GPU.
    package = fxpipe.compile(
        work.build().cuda(),
        (x[: len(x) // 2],),
        devices=DEVICES,
        microbatches=M,
        schedule=options.schedule,
        checkpoint=work.checkpoint,
    )

    def taken(model: nn.Module, backward: Callable[[], object]) -> tuple[float, float]:
        return rate(model, backward, len(x), options.steps)

    def ours() -> tuple[float, float]:
        with TemporaryDirectory() as folder:
            out = package.write(f"{folder}/out")
            pipe = fxpipe.load(out, devices=DEVICES, capture=work.capture)
        return taken(pipe, lambda: pipe.step(x, target=target, loss_fn=work.loss_fn))

    def theirs() -> tuple[float, float]:
        from torchgpipe import GPipe
        from torchgpipe_peer import computing_on, unet_layers

        model = work.build()
        pipe = GPipe(
            model if isinstance(model, nn.Sequential) else unet_layers(model),
            work.balance,
            devices=["cuda:0"] * N,
            chunks=M,
            checkpoint=work.checkpoint,
        )
        # The loss is computed on the last partition's stream, or it would not wait for the output.
        with computing_on(streams), torch.cuda.stream(streams[-1]):
            return taken(pipe, lambda: work.loss_fn(pipe(x), target).backward())

    def plain() -> tuple[float, float]:
        model = work.build().cuda()
        with torch.cuda.stream(streams[0]):
            return taken(model, lambda: work.loss_fn(model(x), target).backward())

    runs = {"plain": plain, "fxpipe": ours, **({"torchgpipe": theirs} if peer else {})}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(options.turns):
        for name, run in runs.items():
            found[name].append(run())
    return {
        name: (statistics.median(r for r, _ in values), max(gib for _, gib in values))
        for name, values in found.items()
    }


def row(work: Work, measured: dict[str, tuple[float, float]]) -> str:
    cells = {name: f"{r:.1f}/s ({gib:.1f} GiB)" for name, (r, gib) in measured.items()}
    ours = measured["fxpipe"][0]
    ratio = f"{ours / measured['torchgpipe'][0]:.2f}" if "torchgpipe" in measured else ""
    return (
        f"| {work.name} | {cells['plain']} | {cells.get('torchgpipe', 'not installed')} "
        f"| {cells['fxpipe']} | {ratio} | {work.goal}/s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", type=int, nargs="*", default=range(len(WORKS)))
    parser.add_argument("--schedule", default="1f1b", help="ours, as compile has it")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep it in GPU.md")
    options = parser.parse_args()
    missing = [] if torch.cuda.is_available() else ["a CUDA device: this machine has none"]
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        missing.append("cuda.bindings, to cut it: pip install 'fxpipe[virtual]'")
    if missing:
        raise SystemExit("not run, for want of\n  " + "\n  ".join(missing))
    peer = find_spec("torchgpipe") is not None
    if not peer:
        print("torchgpipe is not installed (pip install torchgpipe==0.0.7): ours runs alone")
    lines = [
        "# One GPU as four, against torchgpipe 0.0.7\n",
        f"{machine()}. {DEVICES}, {M} micro-batches. Samples per second and peak memory of the",
        "whole GPU; plain is the model on one of the four. Made by",
        "`python benchmarks/gpu.py --write`.\n",
        "| work | plain | torchgpipe | fxpipe | ratio | goal |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    print("\n".join(lines))
    for k in options.works:
        measured = measure(WORKS[k], peer, options)
        lines.append(row(WORKS[k], measured))
        print(lines[-1], flush=True)
    if options.write:
        (HERE / "GPU.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
