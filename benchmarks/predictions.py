"""Predicted steps and peaks against measured ones, on CPU lanes or on one GPU cut into four.

    python benchmarks/predictions.py             print the table
    python benchmarks/predictions.py --write     and keep it in benchmarks/PREDICTIONS.md
    python benchmarks/predictions.py --gpu       larger models, on cuda:0/1 and cuda:0/4

Each example is profiled for a number of lanes; all schedules and checkpoint modes are compiled from
that profile, loaded, and run in turns, a step each, so that what else the machine does falls on all
alike; on a GPU, whose memory they would share, one after the other. Times are medians; a peak is
the fullest device's over a step with gradients there. All of it is done in three rounds, so that
the minute of a profile is not the word on one of steps: of each case, the round counts whose
predicted step is in the middle of the three by its measured one.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import example, machine, size, synchronize
from markdown_table import table
from torch import nn
from torch.utils._pytree import tree_map

import fxpipe
from fxpipe.costs.libraries import drop_workspaces

HERE = Path(__file__).parent
MICROBATCHES = 8
LANES, GPU = "cpu*", "cuda:0/"


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


ALONE = [("gpipe", "never"), ("gpipe", "except_last")]
TOGETHER = [
    ("gpipe", "never"),
    ("1f1b", "never"),
    ("1f1b", "except_last"),
    ("1f1b", "always"),
    ("zb-h1", "never"),
    ("interleaved", "never"),
    ("bfs", "always"),
]


def cases(lanes: int) -> list[Case]:
    """What is compiled for so many lanes."""
    return [Case(lanes, *how) for how in (ALONE if lanes == 1 else TOGETHER)]


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


def from_file(
    name: str, batch: int, build: Callable[[Any], nn.Module] | None = None, **sizes: int
) -> Example:
    """An example, with other sizes than its file says; `build` makes the model of the file."""
    module = example(name)
    for constant, number in sizes.items():
        setattr(module, constant, number)
    torch.manual_seed(0)
    given = module.inputs(batch)
    if isinstance(given, tuple):
        given = {"x": given[0]}
    model = build(module) if build else module.build()
    return Example(model, given, module.targets(batch), module.loss)


def transformer(hidden: int, layers: int, rows: int, sequence: int) -> Example:
    from transformer import batch, blocks, loss_fn

    x, target = batch(hidden, rows, sequence)
    return Example(blocks(hidden, layers), {"input": x}, target, loss_fn)


ON_LANES: dict[str, Callable[[], Example]] = {
    "gpt2": lambda: from_file("gpt2", 16),
    "resnet": lambda: from_file("resnet", 16),
    "unet": lambda: from_file("unet", 16),
    "transformer": lambda: transformer(128, 8, 16, 64),
}
ON_GPU: dict[str, Callable[[], Example]] = {
    "gpt2": lambda: from_file("gpt2", 32, HIDDEN=1024, HEADS=16, SEQUENCE=512, VOCABULARY=8000),
    "resnet": lambda: from_file("resnet", 256, lambda file: file.ResNet(width=64), IMAGE=224),
    "unet": lambda: from_file("unet", 64, lambda file: file.UNet(channels=64), IMAGE=192),
    "transformer": lambda: transformer(2048, 8, 16, 512),
}


def measure(name: str, cases: list[Case], on: str, steps: int) -> list[Row]:
    """All cases of one example that have the same number of lanes, from a profile of now.

    `on` is "cpu*" or "cuda:0/", to which the number of lanes is added.
    """
    made = (ON_LANES if on == LANES else ON_GPU)[name]()
    there = brought(made, on)
    if on != LANES:  # compared there with the graph, which would take long on the CPU
        made.model.cuda()
    profile, packages = None, {}
    for case in cases:
        package = packages[case] = fxpipe.compile(
            made.model,
            kwargs=there.given,
            devices=f"{on}{case.lanes}",
            microbatches=MICROBATCHES,
            loss_fn=made.loss,
            target=there.target,
            schedule=case.schedule,
            checkpoint=case.checkpoint,
            profile=profile,
        )
        profile = package.profile
    made.model.cpu()
    del there
    if on == LANES:
        return in_turns(name, packages, made, on, steps)
    # One after the other: they would share the memory that is measured.
    return [
        row
        for case, package in packages.items()
        for row in in_turns(name, {case: package}, made, on, steps)
    ]


def brought(made: Example, on: str) -> Example:
    """The same with arguments and target where the lanes are."""

    def move(tree: Any) -> Any:
        return tree_map(lambda one: one.cuda() if isinstance(one, torch.Tensor) else one, tree)

    if on == LANES:
        return made
    return made._replace(given=move(made.given), target=move(made.target))


def in_turns(
    name: str,
    packages: Mapping[Case, fxpipe.Package],
    made: Example,
    on: str,
    steps: int,
) -> list[Row]:
    """What is measured of these packages, which are loaded at once and take turns.

    Steps that are timed find the batch where the lanes are; those whose memory is measured do not,
    for what their caller holds is none of theirs.
    """
    there = brought(made, on)
    if on != LANES:
        drop_workspaces(torch.device("cuda", 0))  # of the threads of pipelines before
    pipes = {}
    for case, package in packages.items():
        with tempfile.TemporaryDirectory() as folder:
            pipes[case] = fxpipe.load(package.write(f"{folder}/out", weights=True))
    times: dict[Case, list[float]] = {case: [] for case in packages}
    for _ in range(steps + 1):
        for case, pipe in pipes.items():
            synchronize()
            started = time.perf_counter()
            pipe.step(**there.given, target=there.target, loss_fn=made.loss)
            synchronize()
            times[case].append(1e3 * (time.perf_counter() - started))
    del there
    rows = []
    for case, pipe in pipes.items():
        with pipe.memory() as memory:
            pipe.step(**made.given, target=made.target, loss_fn=made.loss)
            synchronize()
        rows.append(row(name, case, packages[case], memory, times[case]))
    return rows


def row(name: str, case: Case, package: fxpipe.Package, memory: Any, times: Sequence[float]) -> Row:
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


def case_table(cases: list[Row]) -> str:
    heads = "model, lanes, schedule, checkpoint, step predicted, measured, ratio"
    heads += ", peak predicted, measured, ratio of each device"
    rows = []
    for one in cases:
        cells = [one.name, *map(str, one.case), f"{one.predicted_ms:.1f}", f"{one.measured_ms:.1f}"]
        cells += [f"{one.ratio:.2f}", size(one.predicted_bytes)]
        cells += [size(one.measured_bytes), ", ".join(f"{ratio:.2f}" for ratio in one.peaks)]
        rows.append(cells)
    return table(heads.split(", "), rows, text=["schedule", "checkpoint"])


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
    parser.add_argument("--gpu", action="store_true", help="on one GPU, cut into lanes")
    parser.add_argument("--rounds", type=int, help="three, or on a GPU, which is ours alone, one")
    parser.add_argument("--steps", type=int, default=4, help="of each case in a round")
    parser.add_argument("--examples", nargs="*", default=list(ON_LANES))
    parser.add_argument("--lanes", type=int, nargs="*", help="1 and 2, or 1 and 4 on a GPU")
    parser.add_argument("--write", action="store_true", help="keep it in PREDICTIONS.md")
    options = parser.parse_args()
    on, kept = (GPU, "PREDICTIONS_GPU.md") if options.gpu else (LANES, "PREDICTIONS.md")
    n_rounds = options.rounds or (1 if options.gpu else 3)
    measured: list[tuple[Row, ...]] = []
    for name in options.examples:
        for lanes in options.lanes or ((1, 4) if options.gpu else (1, 2)):
            rounds = [measure(name, cases(lanes), on, options.steps) for _ in range(n_rounds)]
            found = list(zip(*rounds, strict=True))
            print(case_table([*map(middle, found)]), flush=True)
            measured += found
    where = "virtual devices of one GPU" if options.gpu else "CPU lanes"
    text = (
        f"# Predicted and measured on {where}\n\n{machine()}.\n"
        f"A batch in {MICROBATCHES} micro-batches. Milliseconds of a training step, medians "
        "of turns taken one after the other; peaks of\nthe fullest lane, and the ratio of each. Of "
        f"{n_rounds} round{'s' * (n_rounds > 1)}, each with a profile of its own, the row shows "
        "the one in the middle by\nthe ratio of steps. Made by `python benchmarks/predictions.py "
        f"{'--gpu ' if options.gpu else ''}--write`.\n\n"
        f"{summary(measured)}\n\n{case_table([*map(middle, measured)])}\n"
    )
    print(text)
    if options.write:
        (HERE / kept).write_text(text)


if __name__ == "__main__":
    main()
