"""What an action takes besides its ops on a CPU lane: that of a stage that does next to nothing."""

import statistics
import time

import torch
from torch import Tensor, nn

from fxpipe.runtime import Pipeline
from fxpipe.runtime.manifest import (
    FORMAT,
    EstimateSpec,
    InputSpec,
    Manifest,
    OutputSpec,
    PortSpec,
    StageSpec,
    StateSpec,
    TensorSpec,
)
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.stream import parse_devices
from fxpipe.runtime.structure import describe
from fxpipe.schedule import Action, Kind, Schedule

_MICROBATCHES = 16
_REPEATS = 20


class _Scale(nn.Module):
    """A number times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def action_ms() -> float:
    """Milliseconds, the median over several steps of forwards and backwards with a loss."""
    m = _MICROBATCHES
    row = tuple(Action(0, kind, i) for i in range(m) for kind in (Kind.FORWARD, Kind.BACKWARD))
    manifest = _manifest()
    stage = Stage(0, manifest.stages[0], _Scale(), 0, torch.device("cpu"), "")
    pipe = Pipeline(manifest, Schedule((row,)), [stage], parse_devices("cpu"), {})
    x = torch.ones(m, 1)
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        pipe.step(x, target=x, loss_fn=_sum)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:]) / len(row)


def _sum(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()


def _manifest() -> Manifest:
    """The plan of one such stage."""
    given = TensorSpec(("batch", 1), "float32")
    made = TensorSpec(("batch", 1), "float32", requires_grad=True)
    stage = StageSpec(
        file="",
        class_name="",
        device=0,
        checkpoint="never",
        random=False,
        ops=1,
        inputs=(PortSpec("x", "x", None, False, given),),
        outputs=(OutputSpec("y", 0, made),),
        parameters=("weight",),
        buffers=(),
        mutated_buffers=(),
        forward_ms=0.0,
        backward_ms=0.0,
        parameter_bytes=0,
        saved_bytes=0,
        received_bytes=0,
    )
    return Manifest(
        format=FORMAT,
        fxpipe="",
        torch="",
        model="",
        fingerprint="",
        batch=_MICROBATCHES,
        sizes={},
        conditions=(),
        microbatches=_MICROBATCHES,
        schedule="",
        devices=("cpu",),
        signature=("x",),
        input_structure=describe({"x": torch.ones(1)})[0],
        inputs=(InputSpec("x", True, given),),
        output_structure=describe(torch.ones(1))[0],
        outputs=stage.outputs,
        stages=(stage,),
        state=(StateSpec("weight", "parameter", TensorSpec((), "float32", requires_grad=True)),),
        estimate=EstimateSpec(0.0, 0.0, (0,)),
        solver="",
        gap=None,
        checked="train and eval",
        profile="",
        files={},
    )
