"""Emission: capture, plan and wiring as the files of a package."""

import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jinja2
import torch
from ruff import find_ruff_bin
from torch import Tensor, nn

import fxpipe
from fxpipe.codegen.blocks import roll
from fxpipe.codegen.calls import home
from fxpipe.codegen.names import plain
from fxpipe.codegen.outlived import mark
from fxpipe.codegen.segments import segment_spec
from fxpipe.codegen.stage_file import StageFile, blocks_file, stage_file
from fxpipe.ir import Capture, PackageFiles, Plan, Profile, StageWiring, Wiring, own_storage
from fxpipe.memory import is_fake
from fxpipe.ops.gradients import gives_gradients, may_have_gradients
from fxpipe.ops.interpret import reads_mode
from fxpipe.ops.specs import tensor_spec
from fxpipe.runtime.leaves import in_mode, places
from fxpipe.runtime.manifest import (
    FORMAT,
    EstimateSpec,
    InputSpec,
    Manifest,
    Mode,
    OutputSpec,
    PortSpec,
    StageSpec,
    StateSpec,
)
from fxpipe.runtime.trace import memory_of, timeline_of

_TEMPLATES = Path(__file__).parent / "templates"


def emit(
    capture: Capture,
    profile: Profile,
    plan: Plan,
    wiring: Wiring,
    *,
    devices: tuple[str, ...],
    capacity_bytes: tuple[int, ...],
) -> tuple[Manifest, PackageFiles]:
    """Write all files in memory. Equal arguments give equal bytes."""
    n = len(wiring.stages)
    mark(capture, profile)
    rolled = roll(capture, wiring)
    wiring = Wiring(
        tuple(
            replace(stage, outputs=scope.outputs)
            for stage, scope in zip(wiring.stages, rolled.stages, strict=True)
        )
    )
    made = [
        stage_file(capture, stage, scope, rolled.blocks, j, n)
        for j, (stage, scope) in enumerate(zip(wiring.stages, rolled.stages, strict=True))
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    stage_template = environment.get_template("stage.py.j2")
    files = {f"stage_{j}.py": stage_template.render(one.fields) for j, one in enumerate(made)}
    if rolled.blocks:
        fields = blocks_file(capture, rolled.blocks)
        files["blocks.py"] = environment.get_template("blocks.py.j2").render(fields)
    files["__init__.py"] = environment.get_template("init.py.j2").render(
        model=plain(capture.model_name), n=n, version=fxpipe.__version__, example="out"
    )
    if capture.functions:
        files["functions.py"] = environment.get_template("functions.py.j2").render(
            model=plain(capture.model_name), functions=capture.functions
        )
    files = _formatted(files)
    files["schedule.csv"] = plan.schedule.to_csv()
    names = {**rolled.crossing, **{given.name: given.name for given in capture.inputs}}
    manifest = _manifest(capture, profile, plan, wiring, made, names, devices, capacity_bytes)
    return manifest, PackageFiles(files, _buffers(capture, made))


def _formatted(files: dict[str, str]) -> dict[str, str]:
    """Through `ruff format`, so that what users get passes their own checks."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        command = [find_ruff_bin(), "format", "--isolated", "--no-cache", "--quiet", folder]
        subprocess.run(command, check=True)
        return {name: (Path(folder) / name).read_text(encoding="utf-8") for name in files}


def _buffers(capture: Capture, made: Sequence[StageFile]) -> dict[str, Tensor]:
    """Values that no constructor makes: of buffers and constants outside stock modules.

    A buffer without memory has none: its values come with the state_dict.
    """
    stock = {
        f"{path}.{name}"
        for path, module in capture.modules.items()
        for name, _ in module.named_buffers()
    }
    kept = {name: capture.state[name] for name in sorted(_held_buffers(capture, made) - stock)}
    return {name: t.detach().clone() for name, t in kept.items() if not is_fake(t)}


def _held_buffers(capture: Capture, made: Sequence[StageFile]) -> set[str]:
    held = {name for one in made for name in one.held}
    return {name for name in held if not isinstance(capture.state[name], nn.Parameter)}


def _manifest(
    capture: Capture,
    profile: Profile,
    plan: Plan,
    wiring: Wiring,
    made: Sequence[StageFile],
    names: Mapping[str, str],
    devices: tuple[str, ...],
    capacity_bytes: tuple[int, ...],
) -> Manifest:
    stages = enumerate(zip(wiring.stages, made, strict=True))
    maker = {value: j for j, stage in enumerate(wiring.stages) for value in stage.outputs}
    given_gradients = _given_gradients(capture, wiring)
    held = _held_buffers(capture, made)
    state = [name for name in capture.state if name in capture.saved or name in held]
    # The first that is there of each tensor's names, by the first that it has in the model.
    first = {capture.first_name(name): name for name in reversed(state)}
    return Manifest(
        format=FORMAT,
        fxpipe=fxpipe.__version__,
        torch=torch.__version__,
        model=capture.model_name,
        fingerprint=capture.fingerprint,
        batch=capture.batch,
        sizes=dict(capture.sizes),
        conditions=capture.conditions,
        microbatches=plan.schedule.n_microbatches,
        schedule=plan.schedule_name,
        devices=devices,
        signature=capture.signature,
        input_structure=capture.input_structure,
        inputs=tuple(
            InputSpec(given.name, given.batched, capture.specs[given.name])
            for given in capture.inputs
        ),
        output_structure=capture.output_structure,
        outputs=tuple(
            OutputSpec(names[value], maker.get(value), capture.specs[value], mode)
            for value, mode in zip(capture.outputs, _output_modes(capture), strict=True)
        ),
        stages=tuple(
            _stage(capture, plan, j, stage, one, names, given_gradients)
            for j, (stage, one) in stages
        ),
        state=tuple(_state(capture, name, first[capture.first_name(name)]) for name in state),
        estimate=EstimateSpec(
            plan.estimate.step_ms,
            plan.estimate.bubble,
            plan.estimate.peak_bytes,
            timeline_of(plan.schedule, plan.estimate.spans),
            memory_of(plan.estimate.memory),
            tuple(map(str, plan.estimate.critical)),
            capacity_bytes,
            profile.loss.ms if profile.loss else 0.0,
            plan.estimate.ahead_bytes,
            plan.estimate.captured_ms,
            plan.estimate.together_bytes,
            tuple(f"{wait.sent} {wait.ended}" for wait in plan.estimate.waits),
        ),
        solver=plan.solver,
        gap=plan.gap,
        checked=capture.checked,
        profile=profile.origin,
        files={},  # known when they are written
    )


def _stage(
    capture: Capture,
    plan: Plan,
    j: int,
    wiring: StageWiring,
    made: StageFile,
    names: Mapping[str, str],
    given_gradients: Set[str],
) -> StageSpec:
    ops = [capture.ops[name] for name in wiring.ops]
    written = {storage for op in ops for storage in op.mutates}
    estimate = plan.estimate.stages[j]
    nodes = (node for node in capture.graph.nodes if node.name in wiring.ops)
    trained = tuple(name for name in made.held if isinstance(capture.state[name], nn.Parameter))
    buffers = tuple(name for name in made.held if name not in trained)
    return StageSpec(
        file=f"stage_{j}.py",
        class_name=f"Stage{j}",
        device=plan.stage_to_device[j],
        checkpoint=plan.checkpoint[j].value,
        random=any(op.random for op in ops),
        ops=len(ops),
        inputs=tuple(
            PortSpec(
                parameter,
                names[port.value],
                port.source,
                port.portal,
                capture.specs[port.value],
                capture.mode(port.value),
            )
            for parameter, port in zip(made.parameters, wiring.inputs, strict=True)
        ),
        outputs=tuple(
            OutputSpec(
                names[value],
                j,
                capture.specs[value],
                capture.mode(value),
                detached=value not in given_gradients,
            )
            for value in wiring.outputs
        ),
        parameters=trained,
        buffers=buffers,
        mutated_buffers=tuple(
            name for name in buffers if own_storage(capture.first_name(name)) in written
        ),
        forward_ms=estimate.forward_ms,
        backward_ms=estimate.backward_ms,
        parameter_bytes=estimate.parameter_bytes,
        saved_bytes=estimate.saved_bytes,
        received_bytes=estimate.received_bytes,
        segments=tuple(segment_spec(capture, names) for names in wiring.segments),
        modes=tuple(dict.fromkeys(home(node) for node in nodes if reads_mode(node) and home(node))),
    )


def _given_gradients(capture: Capture, wiring: Wiring) -> set[str]:
    """The values with a gradient that the caller, or an op of another stage, may give them."""
    home = {op: j for j, stage in enumerate(wiring.stages) for op in stage.ops}
    found = set(capture.outputs)
    for node in capture.graph.nodes:
        if node.name in home and gives_gradients(node, capture.ops[node.name]):
            j = home[node.name]
            found |= {used.name for used in node.all_input_nodes if home.get(used.name, j) != j}
    return found & may_have_gradients(capture)


def _output_modes(capture: Capture) -> Iterator[Mode]:
    """The modes in which each output is one."""
    train, evaluation = (places(in_mode(capture.output_structure, t)) for t in (True, False))
    for k in range(len(capture.outputs)):
        yield "both" if k in train and k in evaluation else "train" if k in train else "eval"


def _state(capture: Capture, name: str, first: str) -> StateSpec:
    tensor = capture.state[name]
    kind: Literal["parameter", "buffer", "constant"] = "constant"
    if isinstance(tensor, nn.Parameter):
        kind = "parameter"
    elif name in capture.saved:
        kind = "buffer"
    alias_of = first if first != name else None
    return StateSpec(name, kind, tensor_spec(tensor), alias_of, _keeps_dtype(capture, name))


def _keeps_dtype(capture: Capture, name: str) -> bool:
    """Whether it is a plain tensor attribute that no forward assigns anew, or made by tracing."""
    owner, _, last = name.rpartition(".")
    module = capture.tree[owner]
    state = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    if last in dict(state):
        return False
    storage = own_storage(capture.first_name(name))
    return not any(storage in op.mutates for op in capture.ops.values())
