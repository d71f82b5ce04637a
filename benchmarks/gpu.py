"""fxpipe against torchgpipe 0.0.7 on one GPU cut into four, side by side in one run.

    pip install torchgpipe==0.0.7 'fxpipe[virtual]'
    python benchmarks/gpu.py             print the table
    python benchmarks/gpu.py --write     and keep it in benchmarks/GPU.md

Both run on the virtual devices `cuda:0/4`, torchgpipe's compute streams being set to theirs; the
same model and batch, 8 micro-batches, SGD. Ours steps by a plan in no more memory than theirs takes
(or by a named --schedule), theirs is called and calls backward; plain is the model on one of the
four. They take turns of several steps; rates are the medians of turns, memory is the peak of the
whole GPU.
"""

import argparse
import gc
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
from markdown_table import head, line
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.ir import Profile
from fxpipe.runtime.device_names import parse_devices
from fxpipe.runtime.stream import current_stream

HERE = Path(__file__).parent
DEVICES = "cuda:0/4"
N, M = 4, 8


@dataclass(frozen=True)
class Work:
    """A model with a batch, how it runs, and the goal in samples per second.

    `balance` is how many layers of it as an nn.Sequential each of torchgpipe's stages has. It takes
    the `gib` in all with that `checkpoint`, of which our devices get `memory`. Of more than two
    stages a device the host, which launches op by op unless it captures, has too much to do.
    """

    name: str
    build: Callable[[], nn.Module]
    balance: list[int]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    checkpoint: str
    capture: str | None
    loops: int | None
    gib: float
    memory: str
    goal: int

    @property
    def row(self) -> str:
        """The first cell of its row."""
        return f"{self.name}, {self.checkpoint}, {self.gib} GiB"


def unet(checkpoint: str, gib: float, memory: str, goal: int) -> Work:
    return Work(
        "U-Net (5, 64), 192 x 192, batch 128",
        lambda: example("unet").UNet(n_blocks=5, channels=64),
        [34, 76, 70, 61],
        lambda: (torch.rand(128, 3, 192, 192), torch.ones(128, 1, 192, 192)),
        F.binary_cross_entropy_with_logits,
        checkpoint,
        None,  # it draws random numbers
        2,
        gib,
        memory,
        goal,
    )


def blocks(hidden: int, sequence: int, rows: int, gib: float, goal: int) -> Work:
    def batch() -> tuple[Tensor, Tensor]:
        x, target = transformer.batch(hidden, rows, sequence)
        return x.bfloat16(), target.bfloat16()

    return Work(
        f"16 blocks, h={hidden}, sequence {sequence}, batch {rows}, bfloat16",
        lambda: transformer.blocks(hidden, 16).bfloat16(),
        [4, 4, 4, 4],
        batch,
        transformer.loss_fn,
        "never",
        "graph",
        None,
        gib,
        f"{gib / N}GiB",
        goal,
    )


WORKS = [
    unet("never", 56.1, "14GiB", 300),
    # They are not at their fullest at once.
    unet("except_last", 12.1, "3.4GiB,4.4GiB,3.8GiB,2.6GiB", 210),
    blocks(2048, 1024, 32, 35.1, 105),
    blocks(1024, 512, 16, 4.8, 400),
]


def built(work: Work) -> nn.Module:
    """The model, made on the GPU, which draws its weights sooner."""
    with torch.device("cuda"):
        return work.build()


def rate(
    model: nn.Module, backward: Callable[[], object], rows: int, steps: int
) -> tuple[float, float]:
    """Samples per second of training steps, and peak GiB; the GPU's cache is emptied before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    taken = seconds(step, steps)
    return rows / taken, torch.cuda.max_memory_allocated() / GIB


def measure(
    work: Work, peer: bool, options: Namespace, profiles: dict[str, Profile]
) -> dict[str, tuple[float, float]]:
    """By who runs: the median rate and the peak GiB. "predicted" are ours, as planned.

    `profiles` are those of the models so far.
    """
    streams = [current_stream(device) for device in parse_devices(DEVICES)]
    x, target = (tensor.cuda() for tensor in work.batch())
    model = built(work)  # compared there with the graph
    named = options.schedule != "auto"
    package = fxpipe.compile(
        model,
        (x,),
        devices=DEVICES,
        microbatches=M,
        loss_fn=work.loss_fn,
        target=target,
        schedule=options.schedule,
        checkpoint=work.checkpoint if named else "auto",
        memory=None if named else work.memory,
        loops=None if named else work.loops,
        profile=profiles.get(work.name),
        capture=work.capture,
        time_limit_s=options.time_limit,
    )
    profiles[work.name] = package.profile
    model.cpu()
    predicted = package.manifest.estimate
    held = predicted.together_bytes or sum(predicted.peak_bytes)

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

        model = built(work)
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
        model = built(work)
        with torch.cuda.stream(streams[0]):
            return taken(model, lambda: work.loss_fn(model(x), target).backward())

    runs = {"plain": plain, "fxpipe": ours, **({"torchgpipe": theirs} if peer else {})}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(options.turns):
        for name, run in runs.items():
            found[name].append(run())
    return {
        "predicted": (1e3 * len(x) / predicted.step_ms, held / GIB),
        **{
            name: (statistics.median(r for r, _ in values), max(gib for _, gib in values))
            for name, values in found.items()
        },
    }


def row(work: Work, measured: dict[str, tuple[float, float]]) -> str:
    cells = {name: f"{r:.1f}/s ({gib:.1f} GiB)" for name, (r, gib) in measured.items()}
    ours = measured["fxpipe"][0]
    ratio = f"{ours / measured['torchgpipe'][0]:.2f}" if "torchgpipe" in measured else ""
    return line(
        [
            work.row,
            cells["plain"],
            cells.get("torchgpipe", "not installed"),
            cells["fxpipe"],
            cells["predicted"],
            ratio,
            f"{work.goal}/s",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", type=int, nargs="*", default=range(len(WORKS)))
    parser.add_argument("--schedule", default="auto", help="ours, as compile has it")
    parser.add_argument("--time-limit", type=float, default=30, help="seconds, of auto's search")
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
        "whole GPU; plain is the model on one of the four. Ours are planned for the memory that",
        "torchgpipe takes; transformers run as one CUDA graph. Made by",
        f"`python benchmarks/gpu.py --write --turns {options.turns} --steps {options.steps} "
        f"--time-limit {options.time_limit:g}`.\n",
        head(["work", "plain", "torchgpipe", "fxpipe", "as predicted", "ratio", "goal"]),
    ]
    print("\n".join(lines))
    profiles: dict[str, Profile] = {}
    for k in options.works:
        measured = measure(WORKS[k], peer, options, profiles)
        lines.append(row(WORKS[k], measured))
        print(lines[-1], flush=True)
    if options.write:
        (HERE / "GPU.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
