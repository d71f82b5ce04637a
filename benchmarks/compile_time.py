"""How long compiling takes, and each pass's share of it.

python benchmarks/compile_time.py            print the table
python benchmarks/compile_time.py --write    and keep it in benchmarks/COMPILE_TIME.md
"""

import argparse
import datetime
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import torch
from common import processor
from markdown_table import table

import fxpipe
from fxpipe import target

HERE = Path(__file__).parent
EXAMPLES = {
    "unet": "U-Net, B=2, C=16, 64x64",
    "gpt2": "GPT-2, 12 layers, hidden 256, sequence 64",
    "resnet": "ResNet-101, width 16, 64x64",
}
DEVICES, BATCH, MICROBATCHES = 2, 8, 4


def seconds(name: str) -> dict[str, float]:
    """Seconds of each pass, and of all together."""
    example = target.load(str(HERE.parent / "examples" / f"{name}.py"))
    model = example.build()
    inputs = example.inputs(BATCH, model)
    started = time.perf_counter()
    package = fxpipe.compile(
        model,
        inputs.args,
        inputs.kwargs,
        devices=["cpu"] * DEVICES,
        microbatches=MICROBATCHES,
    )
    return {**package.timings, "all": time.perf_counter() - started}


def time_table(measured: dict[str, dict[str, float]]) -> str:
    *passes, all_of_them = next(iter(measured.values()))
    rows = [
        [
            EXAMPLES[example],
            *(f"{times[name]:.2f} s ({times[name] / times['all']:.0%})" for name in passes),
            f"{times['all']:.1f} s",
        ]
        for example, times in measured.items()
    ]
    return table(["model", *passes, all_of_them], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep it in COMPILE_TIME.md")
    options = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "ortools"))
    text = (
        f"# Compile time\n\n{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, Python {platform.python_version()}, {versions}. "
        f"{DEVICES} devices, batch {BATCH} in {MICROBATCHES} micro-batches.\n"
        "Made by `python benchmarks/compile_time.py --write`.\n\n"
        f"{time_table({name: seconds(name) for name in EXAMPLES})}\n"
    )
    print(text)
    if options.write:
        (HERE / "COMPILE_TIME.md").write_text(text)


if __name__ == "__main__":
    main()
