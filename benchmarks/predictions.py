"""Predicted steps and peaks against measured ones, on CPU lanes.

    python benchmarks/predictions.py             print the table
    python benchmarks/predictions.py --write     and keep it in benchmarks/PREDICTIONS.md

Each example is profiled for a number of lanes; all schedules and checkpoint modes are compiled from
that profile, loaded, and run in turns, a step each, so that what else the machine does falls on all
alike. Times are medians; a peak is the fullest device's over a step with gradients there. All of it
is done in three rounds, so that the minute of a profile is not the word on one of steps: of each
case, the round counts whose predicted step is in the middle of the three by its measured one.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import example, machine, size
from torch import nn

import fxpipe

HERE = Path(__file__).parent
BATCH, MICROBATCHES = 16, 8


class Example(NamedTuple):
    """A model, its arguments for one batch, and its loss."""

    model: nn.Module
    given: dict[str, Any]
    target: Any
    loss: Callable[[Any, Any], torch.Tensor]


class Case(NamedTuple):
    """How an example is pipelined."""

    lanes: int
    schedule: str
    checkpoint: str


CASES = [
    Case(1, "gpipe", "never"),
    Case(1, "gpipe", "except_last"),
    Case(2, "gpipe", "never"),
    Case(2, "1f1b", "never"),
    Case(2, "1f1b", "except_last"),
    Case(2, "1f1b", "always"),
    Case(2, "zb-h1", "never"),
    Case(2, "interleaved", "never"),
    Case(2, "bfs", "always"),
]


class Row(NamedTuple):
    """What was predicted and what was measured of a case."""

    name: str
    case: Case
    predicted_ms: float
    measured_ms: float
    predicted_bytes: int
    measured_bytes: int
    peaks: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The predicted step by the measured one."""
        return self.predicted_ms / self.measured_ms


def from_file(name: str) -> Example:
    module = example(name)
    torch.manual_seed(0)
    given = module.inputs(BATCH)
    if isinstance(given, tuple):
        given = {"x": given[0]}
    return Example(module.build(), given, module.targets(BATCH), module.loss)


def transformer() -> Example:
    from transformer import batch, blocks, loss_fn

    x, target = batch(128, BATCH, 64)
    return Example(blocks(128, 8), {"input": x}, target, loss_fn)


EXAMPLES: dict[str, Callable[[], Example]] = {
    "gpt2": lambda: from_file("gpt2"),
    "resnet": lambda: from_file("resnet"),
    "unet": lambda: from_file("unet"),
    "transformer": transformer,
}


def measure(name: str, cases: list[Case], steps: int) -> list[Row]:
    """All cases of one example that have the same number of lanes, from a profile of now."""
    made = EXAMPLES[name]()
    profile, packages, pipes = None, {}, {}
    for case in cases:
        package = fxpipe.compile(
            made.model,
            kwargs=made.given,
            devices=["cpu"] * case.lanes,
            microbatches=MICROBATCHES,
            loss_fn=made.loss,
            target=made.target,
            schedule=case.schedule,
            checkpoint=case.checkpoint,
            profile=profile,
        )
        profile = package.profile
        packages[case] = package
        with tempfile.TemporaryDirectory() as folder:
            pipes[case] = fxpipe.load(package.write(f"{folder}/out", weights=True))
    times: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(steps + 1):
        for case, pipe in pipes.items():
            started = time.perf_counter()
            pipe.step(**made.given, target=made.target, loss_fn=made.loss)
            times[case].append(1e3 * (time.perf_counter() - started))
    return [row(name, case, packages[case], pipes[case], times[case], made) for case in cases]


def row(
    name: str,
    case: Case,
    package: Any,
    pipe: fxpipe.Pipeline,
    times: list[float],
    made: Example,
) -> Row:
    with pipe.memory() as memory:
        pipe.step(**made.given, target=made.target, loss_fn=made.loss)
    pairs = [(peak.predicted_bytes, peak.measured_bytes or 0) for peak in memory.peaks]
    predicted, measured = max(pairs, key=lambda pair: pair[1])
    return Row(
        name,
        case,
        package.manifest.estimate.step_ms,
        statistics.median(times[1:]),
        predicted,
        measured,
        tuple(a / b for a, b in pairs),
    )


def table(rows: list[Row]) -> str:
    heads = "model, lanes, schedule, checkpoint, step predicted, measured, ratio"
    heads += ", peak predicted, measured, ratio of each device"
    names = heads.split(", ")
    lines = [
        f"| {' | '.join(names)} |",
        "| --- | ---: | --- | --- |" + " ---: |" * (len(names) - 4),
    ]
    for one in rows:
        cells = [one.name, *map(str, one.case), f"{one.predicted_ms:.1f}", f"{one.measured_ms:.1f}"]
        cells += [f"{one.ratio:.2f}", size(one.predicted_bytes)]
        cells += [size(one.measured_bytes), ", ".join(f"{ratio:.2f}" for ratio in one.peaks)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def middle(rounds: Sequence[Row]) -> Row:
    """The round of a case that its row shows, by the ratio of steps."""
    return sorted(rounds, key=lambda one: one.ratio)[len(rounds) // 2]


def summary(cases: list[tuple[Row, ...]]) -> str:
    """Of each case's rounds: the middle one's step, and all peaks."""
    away = statistics.median(abs(middle(rounds).ratio - 1) for rounds in cases)
    each = statistics.median(abs(one.ratio - 1) for rounds in cases for one in rounds)
    ratios = [ratio for rounds in cases for one in rounds for ratio in one.peaks]
    under = sum(ratio < 1 for ratio in ratios)
    over = sum(ratio > 1.1 for ratio in ratios)
    return (
        f"Predicted step: {away:.1%} from the measured one in the median of {len(cases)}; "
        f"{each:.1%} if each round counts.\n"
        f"Predicted peaks: {min(ratios):.2f} to {max(ratios):.2f} of the measured ones, median "
        f"{statistics.median(ratios):.2f};\n{under} of {len(ratios)} under, {over} more than 10% "
        "over."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of each case in a round")
    parser.add_argument("--examples", nargs="*", default=list(EXAMPLES))
    parser.add_argument("--lanes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--write", action="store_true", help="keep it in PREDICTIONS.md")
    options = parser.parse_args()
    measured: list[tuple[Row, ...]] = []
    for name in options.examples:
        for lanes in options.lanes:
            cases = [case for case in CASES if case.lanes == lanes]
            rounds = [measure(name, cases, options.steps) for _ in range(options.rounds)]
            found = list(zip(*rounds, strict=True))
            print(table([*map(middle, found)]), flush=True)
            measured += found
    text = (
        f"# Predicted and measured on CPU lanes\n\n{machine()}.\n"
        f"Batch {BATCH} in {MICROBATCHES} micro-batches. Milliseconds of a training step, medians "
        "of turns taken one after the other; peaks of\nthe fullest lane, and the ratio of each. Of "
        f"{options.rounds} rounds, each with a profile of its own, the row shows the one in the "
        "middle by\nthe ratio of steps. Made by `python benchmarks/predictions.py --write`.\n\n"
        f"{summary(measured)}\n\n{table([*map(middle, measured)])}\n"
    )
    print(text)
    if options.write:
        (HERE / "PREDICTIONS.md").write_text(text)


if __name__ == "__main__":
    main()
