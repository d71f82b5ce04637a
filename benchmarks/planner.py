"""How good plans are, and how soon they are there: the planner beside baselines and bounds.

python benchmarks/chains.py build/chains           the chains, once
python benchmarks/planner.py [--time-limit 30]     measure what is not there yet, print the tables
python benchmarks/planner.py --write               and keep them in benchmarks/PLANNER.md

Each figure that was measured is kept in the folder of the chains, in `results.json`, so that a long
run may be stopped and goes on where it was; take a figure out there to measure it anew.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import machine
from contestants import Result, best_named, best_of_modes, of_ours, of_pfeife, uniform
from judge import Judge
from markdown_table import table

from fxpipe.chain_file import load_chain
from fxpipe.passes.search.plan import usual_workers

HERE = Path(__file__).parent
# Titles of the chains, in the order of their tables.
CHAINS = {
    "gpt2_xl": "GPT-2 XL",
    "vit_g_14": "ViT-g/14",
    "llama_2_7b": "Llama-2-7B",
    "resnet_101": "ResNet-101",
    "lognormal": "lognormal",
    "heavy": "heavy",
    "sdxl_unet": "SDXL's U-Net",
}
# Seconds of a search where many are made of one chain.
QUICK_S = 10.0
SIZES = [(p, m) for p in (2, 4, 8) for m in (p, 2 * p)]


class Results:
    """Figures by name, each measured once."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def __call__(self, key: str, measure: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The figure called `key`: what `measure` gives, unless it is there."""
        if key not in self.kept:
            self.kept[key] = measure(*args, **options)
            self._file.write_text(json.dumps(self.kept, indent=1))
            print(key, self.kept[key], file=sys.stderr, flush=True)
        return self.kept[key]


# Devices, micro-batches, stages a device, and what is to be reached: the share that devices wait,
# or the step in ms where CP-SAT proved that none is shorter. 1F1B holds p micro-batches.
UNIFORM = (
    (4, 8, 2, "bubble .059"),
    (8, 16, 2, "bubble .068"),
    (8, 32, 2, "bubble .035"),
    (4, 8, 1, "270 ms"),
    (8, 16, 1, "550 ms"),
    (8, 32, 1, "1030 ms"),
)


def uniform_table(results: Results) -> str:
    """Blocks that all take equally long."""
    lines = []
    for p, m, loops, goal in UNIFORM:
        found = results(
            f"uniform/{p}/{m}/{loops}",
            of_ours,
            uniform(p * loops, p * loops),
            p,
            m,
            QUICK_S,
            loops=(loops,),
        )
        bubble = 1 - 30 * m * loops / found["step_ms"]
        cells = [p, m, loops, goal, f"{found['step_ms']:.0f} ms", f"{bubble:.4f}"]
        lines.append([*cells, _gap(found), f"{found['seconds']:.1f} s"])
    return table(["p", "m", "stages a device", "goal", "step", "bubble", "gap", "time"], lines)


def chains_table(results: Results, folder: Path, limit_s: float, names: list[str]) -> str:
    """Every chain on every number of devices."""
    lines, gains, most, gaps = [], [], [], []
    for chain in names:
        file = load_chain(folder / f"{chain}.json")
        judge = Judge(file)
        for p, m in SIZES:
            key = f"{chain}/{p}/{m}"
            named = results(f"named/{key}", best_named, judge, p, m)
            pfeife = results(f"pfeife/{key}", of_pfeife, judge, p, m)
            ours = results(f"ours/{key}", of_ours, file, p, m, limit_s)
            cells = [CHAINS[chain], p, m, *(_step(one) for one in (named, pfeife, ours))]
            for one in (named, pfeife):
                cells.append(f"{_gain(one, ours):+.1%}" if _both_fit(one, ours) else "")
            if _both_fit(pfeife, ours):
                gains.append(_gain(pfeife, ours))
                most.append(pfeife["step_ms"] / ours["bound_ms"] - 1)
            if not ours["over_bytes"]:
                gaps.append(1 - ours["bound_ms"] / ours["step_ms"])
            which = "" if named["over_bytes"] else named["name"]
            lines.append([*cells, _gap(ours), which])
    heading = (
        "chain, p, m, best named, algorithm 1, ours, over named, over algorithm 1, gap, "
        "which is named"
    )
    return (
        f"{table(heading.split(', '), lines)}\n\n"
        f"Medians: algorithm 1 takes {statistics.median(gains):.1%} "
        f"longer than ours, and {statistics.median(most):.1%} longer than the bound, which no plan "
        f"is under; our gap is {statistics.median(gaps):.1%}."
    )


# Chain, p, m, seconds that are allowed.
SOON = (("vit_g_14", 4, 8, 5.0), ("sdxl_unet", 8, 16, 60.0))


def soon_table(results: Results, folder: Path) -> str:
    """How good a plan of up to three stages a device is in the seconds that are allowed."""
    lines = []
    for chain, p, m, limit_s in SOON:
        file = load_chain(folder / f"{chain}.json")
        ours = results(f"soon/{chain}/{p}/{m}", of_ours, file, p, m, limit_s)
        pfeife = results.kept.get(f"pfeife/{chain}/{p}/{m}")
        cells = [CHAINS[chain], p, m, f"{limit_s:.0f} s", f"{ours['seconds']:.1f} s", _step(ours)]
        cells += [_gap(ours)]
        cells += [f"{_step(pfeife)} in {pfeife['seconds']:.0f} s" if pfeife else ""]
        lines.append(cells)
    return table(["chain", "p", "m", "allowed", "took", "step", "gap", "algorithm 1"], lines)


# Schedule, devices, micro-batches, stages a device, goal.
STEPS = (("interleaved", 8, 32, 3, "5 ms"), ("1f1b", 1024, 4096, 1, "60 s, 4 GiB"))


def simulator_table(results: Results) -> str:
    """How long the simulator takes for a step, in a process of its own."""
    lines = []
    for name, p, m, loops, goal in STEPS:
        command = [sys.executable, str(HERE / "simulator.py"), name, str(p), str(m), str(loops)]
        found = results(
            f"simulator/{name}/{p}/{m}/{loops}",
            _answer,
            command,
        )
        cells = [f"{name}, {loops} a device", p, m, f"{found['actions']:,}", goal]
        for part in ("table", "step", "processor"):
            seconds = found[f"{part}_s"]
            cells.append(f"{seconds:.1f} s" if seconds > 1 else f"{1e3 * seconds:.2f} ms")
        lines.append([*cells, f"{found['peak_bytes'] / 2**30:.2f} GiB"])
    heads = "schedule, p, m, actions, goal, making the table, simulating it, "
    heads += "processor time of both, peak memory"
    return table(heads.split(", "), lines)


PRESSED = (("gpt2_xl", 4, 8), ("vit_g_14", 4, 8))
SHARES = (100, 85, 70, 60, 50, 40, 30, 20)


def pressure_table(results: Results, folder: Path) -> str:
    """Less and less memory, down to where nothing fits."""
    lines = []
    for chain, p, m in PRESSED:
        file = load_chain(folder / f"{chain}.json")
        key = f"pressure/{chain}/{p}/{m}"
        most = results(f"{key}/free", of_ours, file, p, m, QUICK_S)["peak_bytes"]
        for share in SHARES:
            capacity = most * share // 100
            ours = results(
                f"{key}/{share}",
                of_ours,
                file,
                p,
                m,
                QUICK_S,
                recompute=True,
                capacity_bytes=capacity,
            )
            modes = results(f"{key}/{share}/modes", best_of_modes, file, p, m, capacity)
            if ours["over_bytes"] and modes is None:
                break
            cells = [CHAINS[chain], p, m, f"{share}%", f"{capacity / 1e9:.2f} GB", _step(ours)]
            if modes is None:
                cells += ["does not fit", "", "", ""]
            elif ours["over_bytes"]:
                cells += [f"{modes[0]:.1f} ms", "", "", modes[1]]
            else:
                faster = [modes[0] / ours[by] - 1 for by in ("step_ms", "bound_ms")]
                cells += [f"{modes[0]:.1f} ms", *(f"{share:+.1%}" for share in faster), modes[1]]
            lines.append(cells)
    heads = "chain, p, m, memory, each device, ours, best of modes, faster, at most, which"
    return table(heads.split(", "), lines)


def _answer(command: list[str]) -> Any:
    return json.loads(subprocess.check_output(command))


def _step(found: Result) -> str:
    return "does not fit" if found["over_bytes"] else f"{found['step_ms']:.1f} ms"


def _gap(found: Result) -> str:
    if found["over_bytes"]:
        return ""
    return f"{max(0.0, 1 - found['bound_ms'] / found['step_ms']):.1%}"


def _both_fit(one: Result, other: Result) -> bool:
    return not one["over_bytes"] and not other["over_bytes"]


def _gain(one: Result, ours: Result) -> float:
    return float(one["step_ms"] / ours["step_ms"] - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=Path, default=HERE.parent / "build" / "chains")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of a search [30]")
    parser.add_argument("--write", action="store_true", help="keep it in PLANNER.md")
    options = parser.parse_args()
    results, limit_s = Results(options.chains / "results.json"), options.time_limit
    there = [name for name in CHAINS if (options.chains / f"{name}.json").exists()]
    text = f"""# How good plans are

{machine()}, load average {os.getloadavg()[1]:.0f}. Seed 0, {usual_workers()} workers, which is what
`fxpipe plan` takes on this machine. Made by `python benchmarks/chains.py build/chains` and
`python benchmarks/planner.py --write --time-limit {options.time_limit:g}`. All steps are the
simulator's word; a gap is how far a step lies above the lower bound, as a share of the step.

## Equal costs

F, I and W of each block take 10 ms, messages nothing, and a device holds what 1F1B would at most.
The goals in ms are optima that CP-SAT proved. Searches of {QUICK_S:.0f} s.

{uniform_table(results)}

## Chains

Costs of an A100 by `analytic:a100` with 36 of 40 GB to use, Adam, NVLink 3; bfloat16 but for
ResNet-101; recomputation off. Lognormal and heavy are made up and very uneven. Best named is the
best schedule that has a name, 1 to 3 stages a device, on cuts of equal time. Algorithm 1 is
Pfeife's (`benchmarks/pfeife.py`). Over: how much longer they take than ours, which are searches of
{limit_s:.0f} s.

{chains_table(results, options.chains, limit_s, there)}

## Soon

{soon_table(results, options.chains)}

## The simulator

{simulator_table(results)}

## Recomputation under pressure

100% is what our plan holds that recomputes nothing. The best of modes is the best of always,
except_last and never, for each named schedule, 1 to 3 stages a device, cut by dynamic programming
at this limit. Searches of {QUICK_S:.0f} s. At most: how much faster than that a step of the lower
bound would be, which holds with all the memory there is.

{pressure_table(results, options.chains)}
"""
    print(text)
    if options.write:
        (HERE / "PLANNER.md").write_text(text)


if __name__ == "__main__":
    main()
