"""What an action takes besides its ops: that of stages that do next to nothing."""

import statistics
import time
from collections.abc import Sequence

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
from fxpipe.runtime.stream import Device, place
from fxpipe.runtime.structure import describe
from fxpipe.schedule import Action, Kind, Schedule

_MICROBATCHES = 16
_REPEATS = 20


class _Scale(nn.Module):
    """A number times a weight of this name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(())))
        self._name = name

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_parameter(self._name)


def action_ms(devices: Sequence[Device]) -> float:
    """Milliseconds of each on lanes that are all busy: they take turns at Python's lock.

    Of GPUs it is what the host takes.
    """
    m, n_lanes = _MICROBATCHES, len(devices)
    manifest = _manifest(n_lanes)
    stages = [
        Stage(j, spec, _Scale(spec.parameters[0]).to(place(on)), j, place(on), "")
        for j, (spec, on) in enumerate(zip(manifest.stages, devices, strict=True))
    ]
    rows = (
        tuple(Action(j, kind, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(m))
        for j in range(n_lanes)
    )
    pipe = Pipeline(manifest, Schedule(tuple(rows)), stages, tuple(devices), {})
    x = torch.ones(m, 1, device=place(devices[-1]))
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        pipe.step(x, target=x, loss_fn=_sum)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:]) / (2 * (m + n_lanes - 1))


def _sum(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()


def _manifest(n_stages: int) -> Manifest:
    """The plan of such stages, each on a lane of its own: `x` goes through all of them."""
    given = TensorSpec(("batch", 1), "float32")
    made = TensorSpec(("batch", 1), "float32", requires_grad=True)
    first = PortSpec("x", "x", None, False, given)
    stages = tuple(
        StageSpec(
            file="",
            class_name="",
            device=j,
            checkpoint="never",
            random=False,
            ops=1,
            inputs=(PortSpec("x", f"x{j - 1}", j - 1, False, made) if j else first,),
            outputs=(OutputSpec(f"x{j}", j, made),),
            parameters=(f"weight{j}",),
            buffers=(),
            mutated_buffers=(),
            forward_ms=0.0,
            backward_ms=0.0,
            parameter_bytes=0,
            saved_bytes=0,
            received_bytes=0,
        )
        for j in range(n_stages)
    )
    weight = TensorSpec((), "float32", requires_grad=True)
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
        devices=("cpu",) * n_stages,
        signature=("x",),
        input_structure=describe({"x": torch.ones(1)})[0],
        inputs=(InputSpec("x", True, given),),
        output_structure=describe(torch.ones(1))[0],
        outputs=stages[-1].outputs,
        stages=stages,
        state=tuple(StateSpec(stage.parameters[0], "parameter", weight) for stage in stages),
        estimate=EstimateSpec(0.0, 0.0, (0,) * n_stages),
        solver="",
        gap=None,
        checked="train and eval",
        profile="",
        files={},
    )
