"""Predicted and measured peaks of the models in `zoo.py`.

python benchmarks/zoo_peaks.py                 run the zoo, print each model's row
python benchmarks/zoo_peaks.py --only NAME...  of these models alone
python benchmarks/zoo_peaks.py --write         and keep each row in benchmarks/PEAKS.md

Each model runs a step on 2 CPU lanes under several schedules, in a process of its own, as it would
for whoever compiles it with its loss and no other option. The libraries are those of
`stock_models.py`.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from common import machine
from markdown_table import line, table
from stock_models import rows_kept, target_of
from torch import Tensor
from torch.utils._pytree import tree_leaves
from zoo import ZOO

import fxpipe
from fxpipe import compiler

TABLE = Path(__file__).with_name("PEAKS.md")
BATCH, MICROBATCHES, LANES = 24, 6, 2


class Case(NamedTuple):
    """How a model is run."""

    schedule: str
    checkpoint: str


class Peaks(NamedTuple):
    """Predicted by measured peak of a case: the fullest lane's, and the lowest of any lane."""

    fullest: float
    lowest: float


CASES = [
    Case("1f1b", "never"),
    Case("zb-h1", "never"),
    Case("interleaved", "never"),
    Case("1f1b", "always"),
]
Row = dict[Case, Peaks | str]


def loss_fn(output: Any, _: object) -> Tensor:
    """The mean square of all that is trained."""
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return sum(value.float().square().mean() for value in found if value.requires_grad)


def measure(name: str) -> Row:
    """Each case's peaks, or what went wrong with it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    target = target_of(ZOO[name])
    model = target.build()
    inputs = target.inputs(BATCH, model)
    row: Row = {}
    capture: Any = compiler.capture_model
    profile: Any = None
    for case in CASES:
        try:
            with mock.patch.object(compiler, "capture_model", capture):
                package = fxpipe.compile(
                    model,
                    inputs.args,
                    inputs.kwargs,
                    devices=["cpu"] * LANES,
                    microbatches=MICROBATCHES,
                    schedule=case.schedule,
                    checkpoint=case.checkpoint,
                    profile=profile,
                    loss_fn=loss_fn,
                )
            capture, profile = mock.Mock(return_value=package.capture), package.profile
            row[case] = peaks(package, inputs)
        except Exception as error:
            # Without the place in a file of this machine.
            told = str(error).splitlines()[0].partition(", at ")[0]
            row[case] = f"{type(error).__name__}: {told[:80]}"
    return row


def peaks(package: fxpipe.Package, inputs: Any) -> Peaks:
    """Of the second step: the first one makes the gradients."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = fxpipe.load(package.write(f"{folder}/out", weights=True))
    pipe.step(*inputs.args, **inputs.kwargs, loss_fn=loss_fn)
    with pipe.memory() as memory:
        pipe.step(*inputs.args, **inputs.kwargs, loss_fn=loss_fn)
    pairs = [(peak.predicted_bytes, peak.measured_bytes) for peak in memory.peaks]
    fullest = max(pairs, key=lambda pair: pair[1])
    return Peaks(fullest[0] / fullest[1], min(a / b for a, b in pairs))


def rows(names: list[str], jobs: int) -> Iterator[tuple[str, Row]]:
    """A row for each model, `jobs` at a time, as they come."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        running = {pool.submit(measure, name): name for name in names}
        for done in as_completed(running):
            yield running[done], done.result()


def cells(name: str, row: Row) -> list[str]:
    """The row in the table."""
    told = [
        f"{found.fullest:.3f}, {found.lowest:.3f}" if isinstance(found, Peaks) else found
        for found in row.values()
    ]
    return [name, *told]


def summary(rows: list[list[str]]) -> str:
    """How many peaks are told too low or too high."""
    told = [cell.split(", ") for cells in rows for cell in cells[1:] if cell[:1].isdecimal()]
    fullest, lowest = ([float(pair[k]) for pair in told] for k in range(2))
    return (
        f"Fullest lanes: {sum(ratio < 1 for ratio in fullest)} of {len(fullest)} under, "
        f"{sum(ratio > 1.1 for ratio in fullest)} more than 10% over, lowest {min(fullest):.3f}, "
        f"median {statistics.median(fullest):.3f}, highest {max(fullest):.3f}.\n"
        f"The lowest of any lane: {sum(ratio < 1 for ratio in lowest)} under, "
        f"lowest {min(lowest):.3f}."
    )


def report(rows: list[list[str]]) -> str:
    heads = ["model", *(f"{case.schedule}, {case.checkpoint}" for case in CASES)]
    return (
        f"# Predicted by measured peaks of stock models\n\n{machine()}.\n"
        f"Batch {BATCH} in {MICROBATCHES} micro-batches on {LANES} CPU lanes; the second step. "
        "Each cell has the ratio of the fullest lane, and the lowest of all lanes.\nMade by "
        f"`python benchmarks/zoo_peaks.py --write`.\n\n{summary(rows)}\n\n{table(heads, rows)}\n"
    )


def main() -> None:
    there = [name for name in ZOO if importlib.util.find_spec(ZOO[name].library)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ZOO, metavar="NAME", default=there)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="models at a time")
    parser.add_argument("--write", action="store_true", help="keep each row in PEAKS.md")
    options = parser.parse_args()
    found: dict[str, list[str]] = {}
    for name, row in rows(options.only, options.jobs):
        found[name] = cells(name, row)
        print(line(found[name]), flush=True)
        if options.write:
            kept = rows_kept(TABLE) | found
            TABLE.write_text(report([kept[name] for name in ZOO if name in kept]))
    print(summary([*found.values()]))


if __name__ == "__main__":
    main()
