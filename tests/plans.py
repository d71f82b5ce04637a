"""Plans that no compiler made, to look at."""

from dataclasses import replace

from fxpipe.runtime.manifest import (
    EstimateSpec,
    InputSpec,
    Manifest,
    OutputSpec,
    PortSpec,
    StageSpec,
    StateSpec,
    TensorSpec,
)

ROWS = TensorSpec(("batch", 1024), "float32", requires_grad=True)
TIED = TensorSpec((1024, 1024), "float32", requires_grad=True)


def stage(j: int, *inputs: PortSpec) -> StageSpec:
    return StageSpec(
        file=f"stage_{j}.py",
        class_name=f"Stage{j}",
        device=j,
        checkpoint="never",
        random=False,
        ops=3 + j,
        inputs=inputs,
        outputs=(OutputSpec(f"x_{j}", None, ROWS),),
        parameters=("embed.weight",) if j != 1 else (),
        buffers=(),
        mutated_buffers=(),
        forward_ms=1.234,
        backward_ms=12.34,
        parameter_bytes=4 * 1024 * 1024 if j != 1 else 0,
        saved_bytes=512,
        received_bytes=0,
    )


def port(value: str, source: int | None, portal: bool = False) -> PortSpec:
    return PortSpec(value, value, source, portal, ROWS)


MANIFEST = Manifest(
    format=1,
    fxpipe="0",
    torch="2",
    model="Tied",
    fingerprint="",
    batch=10,
    sizes={},
    conditions=(),
    microbatches=4,
    schedule="1f1b",
    devices=("cpu", "cpu", "cpu"),
    signature=("x",),
    input_structure={"dict": {"x": {"tensor": 0}}},
    inputs=(InputSpec("x", True, ROWS),),
    output_structure={"tensor": 0},
    outputs=(OutputSpec("x_2", 2, ROWS),),
    stages=(
        stage(0, port("x", None)),
        stage(1, port("x_0", 0)),
        stage(2, port("x_0", 0, portal=True), port("x_1", 1)),
    ),
    state=(StateSpec("embed.weight", "parameter", TIED),),
    estimate=EstimateSpec(step_ms=123.4, bubble=0.25, peak_bytes=(3 * 2**30, 2**20, 100)),
    solver="dp",
    gap=0.01,
    checked="train and eval",
    profile="measured on a CPU",
    files={},
)


TIMELINE = (
    "0F0 0.000 1.000, 2F0 2.000 3.000, 2B0 3.000 5.000, 0I0 7.000 10.000, 0W0 10.000 11.000",
    "1F0 1.000 2.000, 1B0 5.000 7.000",
)


def stepped(timeline: tuple[str, ...] = TIMELINE) -> Manifest:
    """Three stages on two devices; stage 0's backward is halved, and takes 3 ms by itself."""
    specs = [
        replace(spec, device=j % 2, checkpoint="always", forward_ms=1.0, backward_ms=backward_ms)
        for j, (spec, backward_ms) in enumerate(zip(MANIFEST.stages, (3.0, 2.0, 2.0), strict=True))
    ]
    estimate = EstimateSpec(
        11.0, 0.2, (3, 2), timeline, ("0.000 1;2.000 2;2.000 3", "1.000 2"), ("0F0", "1F0")
    )
    return replace(MANIFEST, devices=("cpu", "cpu"), stages=tuple(specs), estimate=estimate)
