"""Which stock models go in, and whether what comes out equals them.

python benchmarks/coverage.py                 run the zoo, print the table
python benchmarks/coverage.py --only NAME...  of these models alone
python benchmarks/coverage.py --write         and keep it in benchmarks/COVERAGE.md

Each model of `zoo.py` is captured and compiled into 2 and 4 stages in a process of its own, then
compared with the plain model in float64, in train and eval mode: outputs, gradients, buffers, at
another batch size than the traced one. The libraries, beside torch:

    pip install transformers diffusers
    pip install --no-deps torchvision==0.28.0 timm    # a CPU build of torch keeps being what it is
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from compile_time import processor
from zoo import ZOO, Entry

import fxpipe
from fxpipe.target import Target
from fxpipe.verify import Verification, verify

HERE = Path(__file__).parent
STAGES = (2, 4)
BATCH, OTHER_BATCH, MICROBATCHES = 6, 7, 3
LIMIT_SECONDS = 600


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

    @property
    def passed(self) -> bool:
        """Whether it is equal at every number of stages, in train and eval mode."""
        all_equal = all(self.equal.get(n, False) for n in STAGES)
        return all_equal and self.modes == "train and eval"


def try_model(entry: Entry, stages: tuple[int, ...] = STAGES) -> Row:
    """Compile and verify it. An exception becomes the row's `why`."""
    row = Row(entry.name, entry.library)
    if importlib.util.find_spec(entry.library) is None:
        row.installed = False
        return row
    passes = [""]
    try:
        for n in stages:
            with tempfile.TemporaryDirectory() as out:
                found = compile_and_verify(entry, n, Path(out) / "out", row, passes)
            row.equal[n] = found.equal
            if not found.equal:
                row.why = f"{n} stages: {worst(found)}"
    except Exception as error:
        row.why = f"{passes[-1]}: {type(error).__name__}: {error}"
    return row


def compile_and_verify(
    entry: Entry, n_stages: int, out: Path, row: Row, passes: list[str]
) -> Verification:
    target = Target(entry.name, __file__, str(HERE), entry.build, entry.inputs)
    inputs = target.inputs(BATCH)
    model = target.build()

    def begins(name: str) -> None:
        row.captured = row.captured or name == "profile"
        passes.append(name)

    package = fxpipe.compile(
        model,
        inputs.args,
        inputs.kwargs,
        devices=["cpu"] * n_stages,
        microbatches=MICROBATCHES,
        progress=begins,
    )
    row.modes, row.ops = package.manifest.checked, len(package.capture.ops)
    package.write(out)
    begins("verify")
    return verify(out, target, batch=OTHER_BATCH, dtype=entry.dtype)


def worst(found: Verification) -> str:
    different = [d for d in found.differences if d.missing or d.relative > found.tolerance]
    first = max(different, key=lambda d: d.relative)
    missing = f", one side only: {first.missing[0]}" if first.missing else ""
    return f"{first.group} differ by {first.relative:.1e} at {first.worst}{missing}"


def in_a_process(entry: Entry) -> Row:
    """The row, made by a process of its own that may take so long and may crash."""
    started = time.perf_counter()
    command = [sys.executable, __file__, "--row", entry.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        row = Row(entry.name, entry.library, why=f"over {LIMIT_SECONDS} s")
    else:
        if done.returncode == 0:
            made = json.loads(done.stdout.splitlines()[-1])
            row = Row(**{**made, "equal": {int(n): ok for n, ok in made["equal"].items()}})
        else:
            said = done.stderr.splitlines()[-1:]
            row = Row(entry.name, entry.library, why=f"crashed: {done.returncode} {said}")
    row.seconds = time.perf_counter() - started
    return row


def table(rows: list[Row]) -> str:
    heads = ["model", "library", "captured", *(f"{n} stages" for n in STAGES), "ops", "seconds"]
    lines = ["| " + " | ".join([*heads, "what failed"]) + " |"]
    lines.append("| --- | --- | --- |" + " --- |" * len(STAGES) + " ---: | ---: | --- |")
    return "\n".join(lines + [f"| {' | '.join(cells(row))} |" for row in rows])


def cells(row: Row) -> list[str]:
    if not row.installed:
        return [row.name, row.library, "not installed", *[""] * (len(STAGES) + 3)]
    captured = row.modes if row.captured else "no"
    equal = [{True: "equal", False: "differs"}.get(row.equal.get(n), "") for n in STAGES]
    why = " ".join(row.why.replace("|", "/").split())[:400]
    seconds = f"{row.seconds:.0f}"
    return [row.name, row.library, captured, *equal, str(row.ops or ""), seconds, why]


def summary(rows: list[Row]) -> str:
    ran = [row for row in rows if row.installed]
    passed, captured = sum(row.passed for row in ran), sum(row.captured for row in ran)
    return (
        f"**{passed} of {len(ran)}** models are equal to the plain model at "
        f"{' and '.join(map(str, STAGES))} stages in train and eval mode; {captured} are captured."
    )


def versions() -> str:
    found = []
    for name in ("torch", "torchvision", "timm", "transformers", "diffusers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def report(rows: list[Row]) -> str:
    return (
        f"# Coverage\n\n{summary(rows)}\n\n"
        f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, Python {platform.python_version()}, {versions()}. "
        f"Traced with a batch of {BATCH} in {MICROBATCHES} micro-batches, compared with one of "
        f"{OTHER_BATCH}. Seconds are of the whole row: imports, two compilations, two "
        "comparisons.\nMade by `python benchmarks/coverage.py --write`.\n\n"
        f"{table(rows)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ZOO, metavar="NAME", default=list(ZOO))
    parser.add_argument("--jobs", type=int, default=1, help="how many models at a time")
    parser.add_argument("--write", action="store_true", help="keep it in COVERAGE.md")
    parser.add_argument("--row", choices=ZOO, metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(dataclasses.asdict(try_model(ZOO[options.row]))))
        return
    rows = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(in_a_process, [ZOO[name] for name in options.only]):
            print(f"| {' | '.join(cells(row))} |", file=sys.stderr, flush=True)
            rows.append(row)
    print(report(rows))
    if options.write:
        (HERE / "COVERAGE.md").write_text(report(rows))


if __name__ == "__main__":
    main()
