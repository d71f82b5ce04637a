"""Which stock models go in, and whether what comes out equals them.

python benchmarks/stock_models.py                 run the zoo, print each model's row
python benchmarks/stock_models.py --only NAME...  of these models alone
python benchmarks/stock_models.py --write         and keep each row in benchmarks/COVERAGE.md

Each model of `zoo.py` is captured and compiled into 2 stages under 1F1B, and into 4 under ZB-H1,
whose backwards are in halves, in a process of its own, and compared with the plain model in
float64, in train and eval mode: outputs, gradients, buffers, at another batch size than the traced
one. The libraries, beside torch:

    pip install transformers diffusers
    pip install --no-deps torchvision==0.28.0 timm    # a CPU build of torch keeps being what it is
"""

import argparse
import contextlib
import datetime
import importlib.util
import multiprocessing
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest import mock

import torch
from common import processor
from markdown_table import line, table
from zoo import ZOO, Entry, library

import fxpipe
from fxpipe import compiler
from fxpipe.target import Target
from fxpipe.verify import Verification, verify

HERE = Path(__file__).parent
TABLE = HERE / "COVERAGE.md"
SCHEDULES = {2: "1f1b", 4: "zb-h1"}  # by number of stages
BATCH, OTHER_BATCH, MICROBATCHES = 6, 7, 3
LIMIT_SECONDS = 900


@dataclass(slots=True)
class Row:
    """What became of one model. `equal` tells by number of stages, `why` what went wrong."""

    name: str
    library: str
    installed: bool = True
    captured: bool = False
    modes: str = ""
    ops: int = 0
    equal: dict[int, bool] = field(default_factory=dict)
    seconds: float = 0.0
    why: str = ""

    def cells(self) -> list[str]:
        """The row in the table."""
        if not self.installed:
            return [self.name, self.library, "not installed", *[""] * (len(SCHEDULES) + 3)]
        captured = self.modes if self.captured else "no"
        equal = [{True: "equal", False: "differs"}.get(self.equal.get(n), "") for n in SCHEDULES]
        why = re.sub(r"/\S*/site-packages/", "", self.why.replace("|", "/"))
        why = " ".join(why.split())[:400]
        measured = [str(self.ops or ""), f"{self.seconds:.0f}"]
        return [self.name, self.library, captured, *equal, *measured, why]


def try_model(entry: Entry) -> Row:
    """Compile and verify it. An exception becomes the row's `why`."""
    row = Row(entry.name, entry.library)
    if importlib.util.find_spec(entry.library) is None:
        row.installed = False
        return row
    passes = [""]
    started = time.perf_counter()
    try:
        for package in compiled(entry, passes):
            n = len(package.manifest.stages)
            row.captured, row.modes = True, package.manifest.checked
            row.ops = len(package.capture.ops)
            with tempfile.TemporaryDirectory() as out:
                found = compared(entry, package.write(Path(out) / "out"))
            row.equal[n] = found.equal
            if not found.equal:
                row.why = f"{n} stages: {worst(found)}"
    except Exception as error:
        row.captured = "profile" in passes
        row.why = f"{passes[-1]}: {type(error).__name__}: {error}"
    row.seconds = time.perf_counter() - started
    return row


def compiled(entry: Entry, passes: list[str]) -> Iterator[fxpipe.Package]:
    """A package for each number of stages, all of one capture and profile."""
    target = target_of(entry)
    model = target.build()
    inputs = target.inputs(BATCH, model)
    capture, profile = compiler.capture_model, None
    for n, schedule in SCHEDULES.items():
        with mock.patch.object(compiler, "capture_model", capture):
            package = fxpipe.compile(
                model,
                inputs.args,
                inputs.kwargs,
                devices=["cpu"] * n,
                microbatches=MICROBATCHES,
                schedule=schedule,
                profile=profile,
                progress=passes.append,
            )
        passes.append("verify")
        yield package
        capture, profile = mock.Mock(return_value=package.capture), package.profile


def compared(entry: Entry, package: Path) -> Verification:
    return verify(package, target_of(entry), batch=OTHER_BATCH, dtype=entry.dtype)


def target_of(entry: Entry) -> Target:
    return Target(entry.name, __file__, str(HERE), entry.build, entry.inputs)


def worst(found: Verification) -> str:
    different = [d for d in found.differences if d.missing or d.relative > found.tolerance]
    first = max(different, key=lambda d: d.relative)
    missing = f", one side only: {first.missing[0]}" if first.missing else ""
    return f"{first.group} differ by {first.relative:.1e} at {first.worst}{missing}"


def run(names: list[str], jobs: int) -> Iterator[Row]:
    """A row each, `jobs` at a time. Each in a process, which may crash and is ended in time."""
    for each in ("torchvision", "timm", "transformers", "diffusers"):  # once, before the forks
        with contextlib.suppress(ModuleNotFoundError):
            library(each)
    fork = multiprocessing.get_context("fork")
    waiting = list(names)
    running: dict[Connection, tuple[str, float, multiprocessing.process.BaseProcess]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=_send_row, args=(waiting[0], sender))
            process.start()
            sender.close()
            running[receiver] = waiting.pop(0), time.perf_counter(), process
        ready = wait(running, timeout=1)
        for receiver, (name, started, process) in list(running.items()):
            seconds = time.perf_counter() - started
            row = Row(name, ZOO[name].library, seconds=seconds)
            if receiver in ready:
                try:
                    row = receiver.recv()
                except EOFError:
                    process.join()
                    row.why = f"crashed with exit code {process.exitcode}"
            elif seconds > LIMIT_SECONDS:
                process.kill()
                row.why = f"over {LIMIT_SECONDS} s"
            else:
                continue
            process.join()
            del running[receiver]
            yield row


def _send_row(name: str, sender: Connection) -> None:
    sender.send(try_model(ZOO[name]))


def rows_kept(table: Path) -> dict[str, list[str]]:
    """The cells of each row that was written to a file, by model."""
    lines = table.read_text().splitlines() if table.exists() else []
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line[:1] == "|"]
    return {cells[0]: cells for cells in rows if cells[0] in ZOO}


def summary(rows: list[list[str]]) -> str:
    ran = [cells for cells in rows if cells[2] != "not installed"]
    captured = sum(cells[2] != "no" for cells in ran)
    passed = sum(set(cells[2 : 3 + len(SCHEDULES)]) == {"train and eval", "equal"} for cells in ran)
    stages = " and ".join(map(str, SCHEDULES))
    return (
        f"**{passed} of {len(ran)}** models are equal to the plain model at {stages} stages in "
        f"train and eval mode; {captured} are captured."
    )


def versions() -> str:
    found = []
    for name in ("torch", "torchvision", "timm", "transformers", "diffusers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def report(rows: list[list[str]]) -> str:
    stages = [f"{n} stages, {schedule}" for n, schedule in SCHEDULES.items()]
    text = ["library", "captured", *stages, "what failed"]
    titles = ["model", *text[:-1], "ops", "seconds", "what failed"]
    return (
        f"# Coverage\n\n{summary(rows)}\n\n"
        f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, Python {platform.python_version()}, {versions()}. "
        f"Traced with a batch of {BATCH} in {MICROBATCHES} micro-batches, compared with one of "
        f"{OTHER_BATCH}. Seconds are of one capture and profile, two plans and two "
        "comparisons.\nMade by `python benchmarks/stock_models.py --write`.\n\n"
        + f"{table(titles, rows, text)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ZOO, metavar="NAME", default=list(ZOO))
    parser.add_argument("--jobs", type=int, default=1, help="how many models at a time")
    parser.add_argument("--write", action="store_true", help="keep each row in COVERAGE.md")
    options = parser.parse_args()
    rows: dict[str, list[str]] = {}
    for row in run(options.only, options.jobs):
        rows[row.name] = row.cells()
        print(line(rows[row.name]), flush=True)
        if options.write:
            kept = rows_kept(TABLE) | rows
            TABLE.write_text(report([kept[name] for name in ZOO if name in kept]))
    print(summary(list(rows.values())))


if __name__ == "__main__":
    main()
