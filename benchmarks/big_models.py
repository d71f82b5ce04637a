"""Models bigger than this machine's memory, compiled for eight H100: seconds by pass, and memory.

python benchmarks/big_models.py            print the table
python benchmarks/big_models.py --write    and keep it in benchmarks/BIG_MODELS.md

Each model is compiled by the command, in a process of its own. Needs transformers and diffusers.
"""

import argparse
import datetime
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import processor
from markdown_table import table

HERE = Path(__file__).parent
MODELS = {
    "llama_2_7b": "Llama-2-7B, 512 tokens",
    "sdxl_unet": "SDXL's U-Net, 1024x1024",
    "mixtral_8x7b": "Mixtral-8x7B, 512 tokens",
}
DEVICES, PROFILE = 8, "analytic:h100"
PASSES = ("capture", "profile", "linearize", "partition", "emit")


def compiled(name: str) -> dict[str, Any]:
    """What compiling took: seconds by pass and in all, of the clock and of processors; memory."""
    with tempfile.TemporaryDirectory() as folder:
        target, out = HERE / "big" / f"{name}.py", Path(folder) / "out"
        command = [sys.executable, "-m", "fxpipe", "compile", str(target), "-o", str(out)]
        command += ["--devices", str(DEVICES), "--profile", PROFILE, "--json"]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        answer, told = process.communicate()
        seconds = time.perf_counter() - start
        if process.returncode:
            raise SystemExit(told.decode())
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = sum(file.read_text().count("\n") for file in out.glob("*.py"))
    facts = json.loads(answer)
    passes = dict(re.findall(r"^(\w+) +([0-9.]+) s$", told.decode(), re.MULTILINE))
    return {
        "ops": sum(stage["ops"] for stage in facts["stages"]),
        "weights": sum(stage["parameter_bytes"] for stage in facts["stages"]) / 2**30,
        "largest": max(stage["parameter_bytes"] for stage in facts["stages"]) / 2**30,
        "checked": facts["checked"],
        "lines": lines,
        "passes": {name: float(passes[name]) for name in PASSES},
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        # The largest of all children so far: models are compiled from the smallest use upwards.
        "peak": used.ru_maxrss / 2**20,
    }


def measured_table(measured: dict[str, dict[str, Any]]) -> str:
    headings = [
        "model",
        "ops",
        "weights",
        "largest stage",
        *PASSES,
        "all",
        "processor time",
        "peak memory",
        "lines",
    ]
    rows = [
        [
            MODELS[name],
            f"{found['ops']:,}",
            f"{found['weights']:.1f} GiB",
            f"{found['largest']:.1f} GiB",
            *(f"{found['passes'][part]:.1f} s" for part in PASSES),
            f"{found['seconds']:.0f} s",
            f"{found['cpu_seconds']:.0f} s",
            f"{found['peak']:.2f} GiB",
            f"{found['lines']:,}",
        ]
        for name, found in measured.items()
    ]
    return table(headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="[default: all]")
    parser.add_argument("--write", action="store_true", help="keep it in BIG_MODELS.md")
    options = parser.parse_args()
    measured = {name: compiled(name) for name in options.models or MODELS}
    load = ", ".join(f"{part:.1f}" for part in os.getloadavg())
    names = ("torch", "transformers", "diffusers")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    checked = ", ".join(dict.fromkeys(found["checked"] for found in measured.values()))
    text = (
        f"# Models bigger than memory\n\n{datetime.date.today()}, {processor()}, "
        f"{os.cpu_count()} cores, load average {load}, Python {platform.python_version()}, "
        f"{versions}.\n"
        f"{DEVICES} stages, batch 8 in 8 micro-batches, costs {PROFILE}; Mixtral in "
        f"bfloat16, the others in float32. Graphs equal to the models in {checked}.\n"
        "Made by `python benchmarks/big_models.py --write`. Times by pass are of the clock; where "
        "the load is above the number of cores, processor time is what a quiet machine takes at "
        "most. Peak memory is of the process, its libraries included.\n\n"
        f"{measured_table(measured)}\n"
    )
    print(text)
    if options.write:
        (HERE / "BIG_MODELS.md").write_text(text)


if __name__ == "__main__":
    main()
