"""fxpipe over two processes against torch.distributed.pipelining, in the same two processes.

    python benchmarks/distributed.py             print the tables
    python benchmarks/distributed.py --write     and keep them in benchmarks/DISTRIBUTED.md
    python benchmarks/distributed.py --compile   also both through torch.compile, in other processes
    python benchmarks/distributed.py --workloads 1 --rounds 2 --rows 16     a quick run

Two gloo ranks of one thread each, on the transformer blocks, weights and batches of cpu_lanes.py.
Ours runs under `load(..., distributed=True)`, theirs every schedule it has for two processes, of
which the fastest counts; `lean` is `auto` within what that one holds. All run in turns, a step each
in random order, so that what else the machine does, and what ran before, falls on all alike. First,
losses and gradients are compared with the plain model's. Then peak memory, what an action that
computes nothing costs with its messages, and a U-Net whose skips pass over stages.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from common import HERE, Compiling, example, machine, size
from markdown_table import table
from overhead import Scale
from overhead import loss_fn as no_loss
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch_pipelining import SCHEDULES, Peer, Pipelined, Rank
from transformer import (
    WORKLOADS,
    Workload,
    batch,
    blocks,
    difference,
    loss_fn,
    milliseconds,
    plain_step,
    same,
    tables,
)

import fxpipe
from fxpipe.runtime.distributed.pipeline import DistributedPipeline
from fxpipe.runtime.memory import Counted, Tally
from fxpipe.runtime.package import read

OURS = ("1f1b", "interleaved", "zb-v", "auto", "lean")
GOALS = dict(zip(WORKLOADS, [(0.92,), (0.86,), (0.95,)], strict=True))
# Turns: short steps take their time from what else the machine does.
ROUNDS = dict(zip(WORKLOADS, (30, 150, 15), strict=True))
TOPOLOGY = "2:eth10"  # as TCP between processes of a host, about
TRIED = 5  # steps of each of theirs, to see which is the fastest
SKIPPING = {"interleaved": "interleaved", "zb-v": "ZBV"}  # ours and theirs, for the U-Net


def named(schedule: str) -> str:
    return f"fxpipe, {schedule}"


# Packages that run through torch.compile too, by what they are called then.
COMPILED = {named(f"{schedule}, compiled"): schedule for schedule in ("1f1b", "auto", "lean")}
# And those schedules of theirs that halve no backward, but GPipe.
THEIRS_COMPILED = {f"{schedule}, compiled": schedule for schedule in ("1F1B", "interleaved")}


class Both(Rank):
    """A rank of both."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._ours: dict[str, DistributedPipeline] = {}

    def prepare_ours(self, folder: Path, compiled: bool) -> None:
        """Load the packages in the folder; or those that are compiled, and compile theirs too."""
        eager = {named(path.name): path.name for path in sorted(folder.iterdir())}
        self._ours = {
            name: fxpipe.load(folder / schedule, distributed=True, compile=compiled)
            for name, schedule in (COMPILED if compiled else eager).items()
        }
        for name, schedule in THEIRS_COMPILED.items() if compiled else ():
            self._theirs[name] = Pipelined(
                schedule, self._model, self._rank, self._m, loss_fn, compile=True
            )

    def step(self, name: str) -> tuple[float, float | None]:
        if name not in self._ours:
            return super().step(name)
        return self._timed(self._ours[name], lambda: self._our_step(name))

    def peak(self, name: str) -> int:
        """The bytes that this rank holds at its fullest, in a step after the first."""
        if name in self._ours:
            self._ours[name].zero_grad()
            with self._ours[name].memory() as memory:
                self._our_step(name)
            return memory.peaks[0].measured_bytes or 0
        tally = Tally(1)
        self._model.zero_grad()

        def steps() -> None:
            pipelined = Pipelined(name, self._model, self._rank, self._m, loss_fn)
            tally.add(0, [p for part in pipelined.parts for p in part.parameters()])
            pipelined.step(self._x, self._target)
            self._model.zero_grad()
            tally.peaks[0] = 0
            pipelined.step(self._x, self._target)

        Counted(tally, 0, steps)()
        return tally.peaks[0]

    def empty(self, folder: Path, m: int, rounds: int) -> dict[str, float]:
        """Median milliseconds of a step whose two stages multiply one number by one weight."""
        ours = fxpipe.load(folder, distributed=True)
        model, x = nn.Sequential(Scale(), Scale()), torch.randn(m, 1)
        theirs = Pipelined("1F1B", model, self._rank, m, no_loss)
        steps: dict[str, Callable[[], float | None]] = {
            "fxpipe": lambda: ours.step(x, target=x, loss_fn=no_loss).item(),
            "torch.distributed.pipelining": lambda: theirs.step(x, x),
        }
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(5 + rounds):
            for name, step in steps.items():
                times[name].append(self._timed(model, step)[0])
        return {name: statistics.median(found[5:]) for name, found in times.items()}

    def skipping(self, folder: Path, gradients: Path) -> float:
        """How far the gradients of a U-Net that was compiled are from those in a file."""
        _, x, target = unet()
        pipe = fxpipe.load(folder, distributed=True)
        pipe.step(x, target=target, loss_fn=example("unet").loss)
        expected = torch.load(gradients)
        own = {name: p.grad for name, p in pipe.named_parameters()}
        return difference(own, expected)

    def skipping_theirs(self, name: str) -> str:
        """How a step of the U-Net ends there."""
        model, x, target = unet()
        schedule, held = SCHEDULES[name]
        parts = ("encoders.2", "bottleneck", "decoders.2")
        try:
            split = dict.fromkeys(parts, SplitPoint.BEGINNING)
            cut = pipeline(model, (x[:1],), split_spec=split)
            stages = [cut.build_stage(j, torch.device("cpu")) for j in held[self._rank]]
            running = schedule(stages, len(x), loss_fn=example("unet").loss)
            if any(stage.is_last for stage in stages):
                running.step(*((x,) if self._rank == 0 else ()), target=target)
            else:
                running.step(*((x,) if self._rank == 0 else ()))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        dist.barrier()
        return "runs"

    def _our_step(self, name: str) -> float:
        return self._ours[name].step(self._x, target=self._target, loss_fn=loss_fn).item()


def unet() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A small U-Net in float64, a batch and its targets; without dropout, to compare numbers."""
    torch.manual_seed(0)
    model = example("unet").UNet(depth=3, n_blocks=1, channels=4).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout2d):
            module.p = 0.0
    return model, torch.rand(4, 3, 32, 32).double(), torch.ones(4, 1, 32, 32).double()


class Measured(NamedTuple):
    """Milliseconds of each step, and bytes of the fuller rank, by who makes it."""

    times: dict[str, list[float]]
    peaks: dict[str, int]


class Prepared:
    """A workload: the plain model, and our packages in a folder; `predicted` are their ms."""

    def __init__(self, work: Workload, folder: Path) -> None:
        self._work = work
        self._model = blocks(work.hidden, work.layers)
        self._x, self._target = batch(work.hidden, work.rows, work.sequence)
        self._packages, self._gradients = folder / "packages", folder / "gradients"
        self._loss = self._plain()
        torch.save({name: p.grad for name, p in self._model.named_parameters()}, self._gradients)
        compile = Compiling(
            self._model, self._x, self._target, loss_fn, work.m, self._packages, TOPOLOGY
        )
        room = f"{self._room()}B"
        self.predicted: dict[str, float] = {}
        for name in OURS:
            out = compile("auto", room, name) if name == "lean" else compile(name)
            self.predicted[named(name)] = read(out).estimate.step_ms

    def measure(self, compiled: bool, rounds: int) -> Measured:
        """Steps, eager or through torch.compile; theirs that are eager in both."""
        peer = Peer(Both)
        peer.prepare(*self._work)
        peer.ask("prepare_ours", self._packages, compiled)
        names = [*(COMPILED if compiled else map(named, OURS)), *SCHEDULES]
        names += THEIRS_COMPILED if compiled else ()
        for name in names:
            loss = peer.step(name)[1]
            away = abs(loss - self._loss) / abs(self._loss)
            same(name, max(peer.difference(self._gradients), away))
        # While memory is counted, stages of torch.compile run op by op, like the others.
        peaks = {} if compiled else {name: max(peer.ask("peak", name)) for name in names}
        times: dict[str, list[float]] = {name: [] for name in ("plain", *names)}
        for _ in range(rounds):
            self._model.zero_grad()
            times["plain"].append(milliseconds(self._plain))
            for name in random.sample(names, len(names)):
                times[name].append(peer.step(name)[0])
        peer.close()
        return Measured(times, peaks)

    def _plain(self) -> float:
        return plain_step(self._model, self._x, self._target, self._work.m)

    def _room(self) -> int:
        """The bytes of the fuller rank under the fastest of their schedules."""
        peer = Peer(Both)
        peer.prepare(*self._work)
        times = {name: [peer.step(name)[0] for _ in range(1 + TRIED)][1:] for name in SCHEDULES}
        best = min(times, key=lambda name: statistics.median(times[name]))
        room: int = max(peer.ask("peak", best))
        peer.close()
        return room


def peak_table(measured: dict[Workload, Measured]) -> str:
    names = list(next(iter(measured.values())).peaks)
    heads = ["h, layers, batch, sequence, m", *names]
    rows = [
        [", ".join(map(str, work)), *(size(found.peaks[name]) for name in names)]
        for work, found in measured.items()
    ]
    return table(heads, rows)


def prediction_table(
    predicted: dict[Workload, dict[str, float]], measured: dict[Workload, Measured]
) -> str:
    """What plan.json says of each step, and the measured median."""
    names = list(next(iter(predicted.values())))
    rows = []
    for work, found in measured.items():
        pairs = [(predicted[work][name], statistics.median(found.times[name])) for name in names]
        cells = [f"{ms:.0f} / {really_ms:.0f}" for ms, really_ms in pairs]
        rows.append([", ".join(map(str, work)), *cells])
    return table(["h, layers, batch, sequence, m", *names], rows)


def empty_actions(m: int, rounds: int) -> str:
    """Microseconds of an action that computes next to nothing, by who runs it."""
    peer = Peer(Both)
    model = nn.Sequential(Scale(), Scale())
    with tempfile.TemporaryDirectory() as folder:
        package = fxpipe.compile(
            model, (torch.randn(m, 1),), devices=["cpu"] * 2, microbatches=m, schedule="1f1b"
        )
        found, _ = peer.ask("empty", package.write(f"{folder}/out"), m, rounds)
    peer.close()
    return ", ".join(f"{name} {1e3 * ms / (2 * m):.0f}" for name, ms in found.items())


def skips() -> str:
    """A line for each schedule under which the U-Net runs, or doesn't."""
    model, x, target = unet()
    pieces = zip(x.split(1), target.split(1), strict=True)
    for piece, wanted in pieces:
        (example("unet").loss(model(piece), wanted) / len(x)).backward()
    titles = ["U-Net", "fxpipe", "torch.distributed.pipelining"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        gradients = Path(folder) / "gradients"
        torch.save({name: p.grad for name, p in model.named_parameters()}, gradients)
        for schedule, theirs in SKIPPING.items():
            package = fxpipe.compile(
                model, (x,), devices=["cpu"] * 2, microbatches=len(x), schedule=schedule
            )
            peer = Peer(Both)
            out = package.write(f"{folder}/{schedule}", weights=True)
            away = max(peer.ask("skipping", out, gradients))
            peer.close()
            error = Peer(Both).first("skipping_theirs", theirs)
            rows.append([schedule, f"runs, gradients within {away:.0e}", error])
    return table(titles, rows, text=titles)


def compiled_tables(measured: dict[Workload, Measured]) -> str:
    """Ours through torch.compile by the best of all of theirs; nothing if none was measured."""
    if not measured:
        return ""
    times = {work: found.times for work, found in measured.items()}
    theirs = [*SCHEDULES, *THEIRS_COMPILED]
    return (
        "Through torch.compile, in processes of their own.\n\n"
        f"{tables(times, theirs, dict.fromkeys(times, ()))}\n\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="also both through torch.compile")
    parser.add_argument("--rounds", type=int, help="turns; else each workload's own number")
    parser.add_argument("--workloads", type=int, nargs="*", default=range(len(WORKLOADS)))
    parser.add_argument("--rows", type=int, help="of a batch; the workload's own if left out")
    parser.add_argument("--write", action="store_true", help="keep it in DISTRIBUTED.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    eager, compiled, predicted, goals, rounds = {}, {}, {}, {}, {}
    for k in options.workloads:
        work = WORKLOADS[k]._replace(**({"rows": options.rows} if options.rows else {}))
        rounds[work] = options.rounds or ROUNDS[WORKLOADS[k]]
        goals[work] = GOALS[WORKLOADS[k]]
        with tempfile.TemporaryDirectory() as folder:
            prepared = Prepared(work, Path(folder))
            predicted[work] = prepared.predicted
            eager[work] = prepared.measure(False, rounds[work])
            print(tables({work: eager[work].times}, SCHEDULES, goals), flush=True)
            if options.compile:
                compiled[work] = prepared.measure(True, rounds[work])
                print(compiled_tables({work: compiled[work]}), flush=True)
    text = (
        f"# Two processes\n\n{machine()}.\n"
        "fxpipe under `load(..., distributed=True)` and torch.distributed.pipelining in the same "
        "two gloo processes of one\nthread each. Milliseconds of a training step in "
        f"{', '.join(map(str, rounds.values()))} turns, each in random order; plain is one "
        "thread,\nmicro-batch by micro-batch; limit is plain on two ranks with the bubble of "
        "1F1B; lean is auto\nin the memory of the fastest of theirs.\n"
        f"Made by `python benchmarks/distributed.py{' --compile' * options.compile} --write`.\n\n"
        f"{tables({work: found.times for work, found in eager.items()}, SCHEDULES, goals)}\n\n"
        "Milliseconds that plan.json says, and the medians:\n\n"
        f"{prediction_table(predicted, eager)}\n\n"
        "What the fuller rank holds at its fullest: its parameters, and the memory of all tensors "
        "that its ops make;\nfxpipe's with copies of the micro-batches that it reads.\n\n"
        f"{peak_table(eager)}\n\n"
        f"{compiled_tables(compiled)}"
        "Microseconds of a rank's action that multiplies one number by another, with what it "
        f"receives and sends\n(1F1B, 32 micro-batches): {empty_actions(32, 50)}.\n\n"
        "A U-Net in four parts on two ranks, in float64 against the plain model; its skips pass "
        f"over a part.\n\n{skips()}\n"
    )
    print(text)
    if options.write:
        (HERE / "DISTRIBUTED.md").write_text(text)


if __name__ == "__main__":
    main()
