"""What the benchmarks share: the machine in words, examples as modules, times, and peak memory."""

import datetime
import importlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import fxpipe
from fxpipe.ir import Profile

HERE = Path(__file__).parent
GIB = 2**30


def processor() -> str:
    """The CPU by name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "")


def machine() -> str:
    """The date, the processor or GPUs, and versions."""
    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    cpu = f"{processor()}, {os.cpu_count()} cores"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return ", ".join([str(datetime.date.today()), *(names or [cpu]), versions])


def example(name: str) -> ModuleType:
    """The file of `examples` as a module."""
    sys.path.append(str(HERE.parent / "examples"))
    return importlib.import_module(name)


def lanes(n: int, kind: str) -> list[str]:
    """`n` devices of a kind, "cpu" or "cuda"; fewer if there are not as many GPUs."""
    if kind == "cpu":
        return ["cpu"] * n
    return [f"cuda:{k}" for k in range(min(n, torch.cuda.device_count()))]


def synchronize() -> None:
    """Wait until all GPUs have done what was asked of them."""
    for k in range(torch.cuda.device_count()):
        torch.cuda.synchronize(k)


class Compiling:
    """Compiles the model for two lanes; all schedules are planned from what was measured once.

    `topology` stands for the links of lanes, which hand over for nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        x: torch.Tensor,
        target: torch.Tensor,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        m: int,
        folder: Path,
        topology: str | None = None,
    ) -> None:
        self._model, self._x, self._m, self._folder = model, x, m, folder
        self._loss = {"target": target, "loss_fn": loss_fn}
        self._topology = topology
        self._profile: Profile | None = None

    def __call__(self, schedule: str, memory: str | None = None, name: str = "") -> Path:
        """The package's folder, of this name or named after the schedule."""
        package = fxpipe.compile(
            self._model,
            (self._x,),
            devices="cpu*2",
            microbatches=self._m,
            schedule=schedule,
            profile=self._profile,
            topology=self._topology,
            memory=memory,
            **self._loss,
        )
        self._profile = package.profile
        return package.write(self._folder / (name or schedule), weights=True)


def seconds(step: Callable[[], object], repeats: int, warmup: int = 2) -> float:
    """The median of `repeats` steps."""
    times = []
    for _ in range(warmup + repeats):
        synchronize()
        started = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[warmup:])


def peak_bytes(pipe: fxpipe.Pipeline, step: Callable[[], object]) -> list[int]:
    """What each device holds at its fullest over a step."""
    with pipe.memory() as memory:
        step()
        synchronize()
    return [peak.measured_bytes or 0 for peak in memory.peaks]


def size(n_bytes: float) -> str:
    """Bytes in GiB, or in MiB where they are few."""
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:.1f} MiB"
