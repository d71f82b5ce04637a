"""The straight line from a model to a package, each pass in its place."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fxpipe.capacity import capacities
from fxpipe.capture import capture as capture_model
from fxpipe.capture import flat_inputs
from fxpipe.codegen.emit import emit
from fxpipe.devices import device_named
from fxpipe.errors import CaptureError, InputError
from fxpipe.ir import Capture, Chain, CheckpointMode, Profile
from fxpipe.memory import lacks_memory
from fxpipe.optimizer import Optimizer, optimizer_of
from fxpipe.package import Package
from fxpipe.partial import largest_part
from fxpipe.passes.analytic import analytic
from fxpipe.passes.linearize import linearize
from fxpipe.passes.order import NAMES as SCHEDULES
from fxpipe.passes.order import build as build_schedule
from fxpipe.passes.order import given as given_schedule
from fxpipe.passes.order import usual_loops
from fxpipe.passes.partition import SOLVERS, partition
from fxpipe.passes.portals import wire
from fxpipe.passes.profile import profile as profile_ops
from fxpipe.passes.search_plan import LOOPS, TIME_LIMIT_S, search
from fxpipe.passes.search_plan import NAME as AUTO
from fxpipe.runtime.manifest import OptimizerSpec
from fxpipe.runtime.stream import Device, Devices, parse_devices
from fxpipe.schedule import Schedule
from fxpipe.topology import network_of


def compile(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Devices,
    microbatches: int,
    schedule: str | Schedule = "1f1b",
    loops: int | None = None,
    checkpoint: str = "never",
    solver: str = "dp",
    profile: Profile | str | None = None,
    optimizer: str | Optimizer = "sgd",
    memory: str | None = None,
    topology: str | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    seed: int = 0,
    allow_graph_breaks: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Package:
    """Compile `model`, called as `model(*args, **kwargs)`, into a pipeline.

    `args` and `kwargs` hold one whole batch (dimension 0), which is cut into `microbatches`.
    `devices` is a count, a list, or text such as `"cuda:0,cuda:1"`, `"cpu*4"` and `"cuda:0/4"`.
    `schedule` is gpipe, 1f1b, zb-h1, zb-h2, zb-v, interleaved, bfs or a member of Pfeife's family
    such as `"pfeife:B_l=4,B_f=2"`; `loops`, the stages a device, are 2 under zb-v, interleaved and
    bfs, else 1. Or it is a table of your own, with a row for each device. `checkpoint` is never,
    except_last or always, `solver` dp, beam or cpsat.

    With `schedule="auto"` cuts, stages a device, map and order are searched together for
    `time_limit_s`, with chance from `seed`; with `checkpoint="auto"` so are the parts of stages
    that are computed again in backward, for a named schedule too.

    A given `profile` must be of the same model
    and micro-batch; text such as `analytic:h100` has it worked out for that device, and a model
    built `without_memory()` needs that. `progress` is told each pass as it starts.

    `optimizer`, sgd, momentum, adam, adamw, a file that describes one, or an `Optimizer`, says what
    a device holds besides parameters; `memory`, such as `"22GiB"` or a list with an amount for each
    device, how much it may hold, by default what it has. `topology`, such as
    `"4x8:nvlink4/ib400"`, stands for the profile's links.

    With `allow_graph_breaks`, a model that can't be captured as one graph gives a package of its
    largest part that can: `manifest.part` names it, and `splice` puts it into the model.

    The model is left as it was. Raises an FxpipeError for whatever can't be done.
    """
    lanes = parse_devices(devices)
    _check_settings(microbatches, loops, schedule, checkpoint, solver)
    table = _table(schedule, len(lanes), microbatches, loops)  # refused before the work
    _check_costs(model, profile)
    if isinstance(optimizer, str):
        optimizer = optimizer_of(optimizer)
    room = None if memory is None else capacities(memory, len(lanes))
    network = None if topology is None else network_of(topology, len(lanes))
    line = _Line(progress)
    with line("capture"):
        part = None
        try:
            captured = capture_model(model, args, kwargs or {})
        except CaptureError as error:
            if not allow_graph_breaks:
                raise
            part = largest_part(model, args, kwargs or {}, error)
            model, args, kwargs, captured = part.module, (), part.given, part.capture
    with line("profile"):
        inputs = flat_inputs(model, args, kwargs or {})
        profile = _priced(captured, model, inputs, profile, microbatches, lanes)
    with line("linearize"):
        chain = linearize(captured, profile)
    capacity_bytes = room or (profile.capacity_bytes,) * len(lanes)
    training_factor = optimizer.training_factor(model.parameters())
    with line("partition"):
        if table is None or checkpoint == AUTO:
            plan = search(
                chain,
                n_devices=len(lanes),
                n_microbatches=microbatches,
                network=network or profile.network,
                capacity_bytes=capacity_bytes,
                training_factor=training_factor,
                recompute=checkpoint == AUTO,
                loops=LOOPS if loops is None else (loops,),
                table=table,
                schedule_name=schedule if isinstance(schedule, str) else "given",
                seed=seed,
                time_limit_s=time_limit_s,
                progress=lambda ms: progress(f"partition: {ms:.3f} ms"),
            )
        else:
            plan = partition(
                chain,
                n_stages=table.n_stages,
                loops=max(Counter(table.stage_to_device).values()),
                n_microbatches=microbatches,
                schedule=schedule,
                checkpoint=CheckpointMode(checkpoint),
                network=network or profile.network,
                capacity_bytes=capacity_bytes,
                training_factor=training_factor,
                solver=solver,
            )
    with line("portals"):
        wiring = wire(captured, chain, plan)
    with line("emit"):
        manifest, files = emit(
            captured,
            profile,
            plan,
            wiring,
            devices=tuple(map(str, lanes)),
            capacity_bytes=capacity_bytes,
        )
    manifest = dataclasses.replace(
        manifest,
        part=None if part is None else part.spec,
        optimizer=OptimizerSpec(str(optimizer), training_factor),
    )
    return Package(manifest, captured, profile, chain, plan, wiring, files, line.seconds)


def measure(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Devices,
    microbatches: int,
    profile: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """What `compile` plans by: the costs of each op of `model` and the links between `devices`.

    They are measured here, or, with `profile` such as `analytic:h100`, worked out for that device.
    """
    lanes = parse_devices(devices)
    _check_costs(model, profile)
    line = _Line(progress)
    with line("capture"):
        captured = capture_model(model, args, kwargs or {})
    with line("profile"):
        inputs = flat_inputs(model, args, kwargs or {})
        return _priced(captured, model, inputs, profile, microbatches, lanes)


def chained(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Devices,
    microbatches: int,
    profile: Profile | str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Chain, Profile]:
    """What `compile` plans: the chain of `model`'s blocks, and the costs that are in it."""
    lanes = parse_devices(devices)
    _check_costs(model, profile)
    line = _Line(progress)
    with line("capture"):
        captured = capture_model(model, args, kwargs or {})
    with line("profile"):
        inputs = flat_inputs(model, args, kwargs or {})
        found = _priced(captured, model, inputs, profile, microbatches, lanes)
    with line("linearize"):
        return linearize(captured, found), found


def _priced(
    capture: Capture,
    model: nn.Module,
    inputs: Sequence[Tensor],
    profile: Profile | str | None,
    microbatches: int,
    devices: Sequence[Device],
) -> Profile:
    """The given profile if it fits, or one as asked for."""
    if profile is None:
        return profile_ops(capture, model, inputs, n_microbatches=microbatches, devices=devices)
    if isinstance(profile, str):
        return analytic(capture, model, inputs, n_microbatches=microbatches, device=profile)
    _check_profile(profile, capture, microbatches)
    return profile


def _check_settings(
    microbatches: object, loops: object, schedule: str | Schedule, checkpoint: str, solver: str
) -> None:
    """Before the work rather than after it, and all at once."""
    wrong = []
    for what, count in (("microbatches", microbatches), ("loops", 1 if loops is None else loops)):
        if not isinstance(count, int) or count < 1:
            wrong.append(f"{what} is a whole number, at least 1, not {count!r}")
    modes = (*(mode.value for mode in CheckpointMode), AUTO)
    named = SCHEDULES[0] if isinstance(schedule, Schedule) else str(schedule).partition(":")[0]
    for what, name, names in (
        ("schedule", named, (*SCHEDULES, AUTO)),
        ("checkpoint mode", checkpoint, modes),
        ("solver", solver, SOLVERS),
    ):
        if name not in names:
            wrong.append(f"there is no {what} {name!r}: use one of {', '.join(names)}")
    if schedule == AUTO and checkpoint not in (CheckpointMode.NEVER, AUTO):
        wrong.append(
            f"the schedule auto recomputes nothing or chooses what: give checkpoint never or auto, "
            f"not {checkpoint}"
        )
    if wrong:
        raise InputError("\n".join(wrong))


def _table(
    schedule: str | Schedule, n_devices: int, microbatches: int, loops: int | None
) -> Schedule | None:
    """The table that is asked for; none if it is searched."""
    if schedule == AUTO:
        return None
    if isinstance(schedule, Schedule):
        return given_schedule(schedule, n_devices, microbatches, loops)
    loops = usual_loops(schedule, n_devices) if loops is None else loops
    return build_schedule(schedule, n_devices, microbatches, loops)


def _check_costs(model: nn.Module, profile: Profile | str | None) -> None:
    if isinstance(profile, str):
        device_named(profile)  # before the work rather than after it
    elif profile is None and lacks_memory(model):
        raise InputError(
            f"{type(model).__name__} was built without memory, so that nothing can be measured: "
            "compile it with profile='analytic:h100' or another device's"
        )


def _check_profile(profile: Profile, capture: Capture, microbatches: int) -> None:
    if profile.fingerprint != capture.fingerprint:
        raise InputError(
            f"the profile is of another model, or of another version of it (fingerprint "
            f"{profile.fingerprint}, this model's is {capture.fingerprint}): measure it anew"
        )
    missing = [name for name, op in capture.ops.items() if op.mode != "eval"]
    missing = [name for name in missing if name not in profile.costs]
    if missing:
        raise InputError(f"the profile has no cost of {', '.join(missing[:3])}: measure it anew")
    rows = -(-capture.batch // microbatches)
    if profile.batch != rows:
        raise InputError(
            f"the profile is of micro-batches of {profile.batch} rows, but a batch of "
            f"{capture.batch} in {microbatches} micro-batches has {rows}: measure it anew"
        )


class _Line:
    """Tells which pass runs and keeps how long each took."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._progress(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
