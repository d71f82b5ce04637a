"""torchgpipe's tables 2 to 4 (arXiv 2004.09910, section 4), with `pipe.step`.

    python benchmarks/tables.py                  at the paper's sizes, on all GPUs
    python benchmarks/tables.py --table 3 --capacity 22
    python benchmarks/tables.py --devices cpu    small, on CPU lanes

2: AmoebaNet-D (18, 256), samples per second by stages n and micro-batches m. 3: the largest U-Net
(B, C) that fits: from the paper's size on, B grows by half for as long as every device stays under
the capacity (or is halved until it does). 4: samples per second of U-Net (5, 64). Plain is one
stage and one micro-batch, nothing computed twice. Where there are no GPUs sizes are small, given by
the options.
"""

import argparse
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from common import GIB, example, lanes, machine, peak_bytes, seconds, size
from markdown_table import head, line
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import StageError


class Row(NamedTuple):
    """Stages, micro-batches, rows of a batch, what is recomputed."""

    n: int
    m: int
    batch: int
    checkpoint: str = "except_last"


TABLE_2 = [
    Row(2, 1, 96, "always"),
    Row(2, 4, 256),
    Row(2, 32, 1280),
    Row(4, 1, 160, "always"),
    Row(4, 4, 360),
    Row(4, 32, 1152),
    Row(8, 1, 196, "always"),
    Row(8, 4, 480),
    Row(8, 32, 1280),
]
TABLE_3 = [  # with (B, C)
    (Row(1, 1, 32, "never"), 6, 72),
    (Row(1, 32, 32), 11, 128),
    (Row(2, 32, 32), 24, 128),
    (Row(4, 32, 32), 24, 160),
    (Row(8, 32, 32), 48, 160),
]
TABLE_4 = [
    Row(1, 1, 40, "never"),
    Row(1, 2, 80),
    Row(2, 32, 512),
    Row(4, 16, 512),
    Row(8, 40, 640),
]


class Measured(NamedTuple):
    """Of a training: samples per second, each device's peak bytes, the model's parameters."""

    rate: float
    peaks: list[int]
    parameters: int


def train(
    build: Callable[[], nn.Module],
    x: Tensor,
    target: Tensor,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    row: Row,
    options: Namespace,
) -> Measured | None:
    """Steps of SGD of the model as a pipeline; None if memory was not enough."""
    devices = lanes(row.n, options.devices)
    with fxpipe.without_memory():
        model = build()
    package = fxpipe.compile(
        model,
        (x,),
        devices=devices,
        microbatches=row.m,
        checkpoint=row.checkpoint,
        profile="analytic:cpu" if options.devices == "cpu" else "analytic:h100",
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            pipe = fxpipe.load(package.write(f"{folder}/out"))
        x, target = x.to(devices[0]), target.to(devices[-1])
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            pipe.step(x, target=target, loss_fn=loss_fn)
            optimizer.step()

        rate = row.batch / seconds(step, options.repeats)
        parameters = sum(parameter.numel() for parameter in pipe.parameters())
        return Measured(rate, peak_bytes(pipe, step), parameters)
    except (torch.OutOfMemoryError, StageError) as error:
        if torch.OutOfMemoryError not in (type(error), type(error.__cause__)):
            raise
        return None
    finally:
        torch.cuda.empty_cache()


def amoebanet(row: Row, options: Namespace) -> Measured | None:
    net, (layers, filters) = example("amoebanet"), options.amoebanet
    image = options.image or 224
    return train(
        lambda: net.AmoebaNet(layers, filters, classes=1000),
        torch.rand(row.batch, 3, image, image),
        torch.arange(row.batch) % 1000,
        F.cross_entropy,
        row,
        options,
    )


def unet(blocks: int, channels: int, row: Row, options: Namespace) -> Measured | None:
    net, image = example("unet"), options.image or 192
    return train(
        lambda: net.UNet(n_blocks=blocks, channels=channels),
        torch.rand(row.batch, 3, image, image),
        torch.ones(row.batch, 1, image, image),
        F.binary_cross_entropy_with_logits,
        row,
        options,
    )


def possible(rows: list[Row], options: Namespace) -> Iterator[tuple[Row, list[object]]]:
    """The rows with their batches at the wanted size, and how they begin in the table."""
    for row in rows:
        scaled = row._replace(batch=max(row.m, row.batch // options.divide))
        name = "plain" if row.checkpoint == "never" else str(row.n)
        begin = [name, row.m, scaled.batch]
        if len(lanes(row.n, options.devices)) < row.n:
            print(line([*begin, f"needs {row.n} GPUs", ""]))
        else:
            yield scaled, begin


def speeds(
    rows: list[Row], run: Callable[[Row, Namespace], Measured | None], options: Namespace
) -> None:
    """A table of samples per second, and how many times the first row's they are."""
    print(head(["n", "m", "batch", "samples/s", "speed-up"]))
    first = None
    for row, begin in possible(rows, options):
        measured = run(row, options)
        if measured is None:
            print(line([*begin, "does not fit", ""]))
            continue
        first = first or measured.rate
        print(line([*begin, f"{measured.rate:.2f}", f"{measured.rate / first:.2f}"]))


def table_2(options: Namespace) -> None:
    layers, filters = options.amoebanet
    print(f"\nTable 2: AmoebaNet-D ({layers}, {filters})\n")
    speeds(TABLE_2, amoebanet, options)


def table_3(options: Namespace) -> None:
    capacity = options.capacity * GIB
    print(f"\nTable 3: the largest U-Net with at most {size(capacity)} on each device\n")
    print(head(["n", "m", "batch", "B, C", "parameters", "peak of all"], text=["B, C"]))
    sizes = {row: (blocks, channels) for row, blocks, channels in TABLE_3}
    for row, begin in possible(list(sizes), options):
        paper = next(of for known, of in sizes.items() if known[:2] == row[:2])
        blocks, channels = (max(1, number // options.shrink) for number in paper)
        channels = 2 * -(-channels // 2)
        largest = None
        while blocks:
            measured = unet(blocks, channels, row, options)
            fits = measured is not None and max(measured.peaks) <= capacity
            if fits:
                largest = blocks, measured
            elif largest is not None:
                break
            blocks = blocks + max(1, blocks // 2) if fits else blocks // 2
        if largest is None:
            print(line([*begin, f"1, {channels} does not fit", "", ""]))
        else:
            blocks, measured = largest
            end = [f"{measured.parameters / 1e6:.2f}M", size(sum(measured.peaks))]
            print(line([*begin, f"{blocks}, {channels}", *end]))


def table_4(options: Namespace) -> None:
    blocks, channels = options.unet
    print(f"\nTable 4: U-Net ({blocks}, {channels})\n")
    speeds(TABLE_4, lambda row, options: unet(blocks, channels, row, options), options)


def main() -> None:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=int, nargs="*", choices=(2, 3, 4), default=(2, 3, 4))
    parser.add_argument("--devices", choices=("cuda", "cpu"), default="cuda" if gpus else "cpu")
    small = parser.parse_known_args()[0].devices == "cpu"
    add = parser.add_argument
    add("--amoebanet", type=int, nargs=2, default=(3, 16) if small else (18, 256))
    add("--unet", type=int, nargs=2, default=(2, 4) if small else (5, 64))
    add("--image", type=int, default=64 if small else None, help="side; the paper's if left out")
    add("--divide", type=int, default=32 if small else 1, help="batches by this")
    add("--shrink", type=int, default=16 if small else 1, help="table 3's (B, C) by this")
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else 2**23
    add("--capacity", type=float, default=memory / GIB, help="GiB of a device, for table 3")
    add("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.devices == "cuda" and not gpus:
        raise SystemExit("no GPU here: --devices cpu runs a smaller size on CPU lanes")
    torch.set_num_threads(1)
    print(f"{machine()}; images of side {options.image or 'as in the paper'}, on {options.devices}")
    for number in options.table:
        {2: table_2, 3: table_3, 4: table_4}[number](options)


if __name__ == "__main__":
    main()
