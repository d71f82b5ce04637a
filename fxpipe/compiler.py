"""The straight line from a model to a package, each pass in its place."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxpipe.capture import capture as capture_model
from fxpipe.capture import flat_inputs
from fxpipe.capture.inputs import batch_of
from fxpipe.codegen.emit import emit
from fxpipe.costing import priced
from fxpipe.costs.capacity import capacities
from fxpipe.costs.criterion import Loss
from fxpipe.costs.first_microbatch import check_rows, fitting
from fxpipe.costs.optimizer import Optimizer, optimizer_of
from fxpipe.costs.topology import network_of
from fxpipe.errors import CaptureError, MixedRowsWarning, PlanError
from fxpipe.ir import Plan, Profile
from fxpipe.package import Package
from fxpipe.partial import largest_part
from fxpipe.passes.linearize import linearize
from fxpipe.passes.portals import wire
from fxpipe.passes.search.named import candidate
from fxpipe.passes.search.plan import TIME_LIMIT_S
from fxpipe.passes.simulate_launches import Hosts
from fxpipe.planned import planned, weighed_against
from fxpipe.question import Question
from fxpipe.runtime.device_names import parse_devices
from fxpipe.runtime.end import LossFn
from fxpipe.runtime.manifest import CandidateSpec, OptimizerSpec
from fxpipe.runtime.stream import Devices
from fxpipe.schedule import Schedule
from fxpipe.schedule_check import check
from fxpipe.settings import (
    check_blocks,
    check_costs,
    check_settings,
    microbatch_counts,
    table_of,
)


def compile(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Devices,
    microbatches: int | str,
    loss_fn: LossFn | None = None,
    target: Any = None,
    schedule: str | Schedule = "1f1b",
    loops: int | None = None,
    checkpoint: str = "never",
    solver: str = "dp",
    profile: Profile | str | None = None,
    optimizer: str | Optimizer = "sgd",
    memory: str | None = None,
    topology: str | None = None,
    capture: str | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    seed: int = 0,
    workers: int | None = None,
    allow_graph_breaks: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Package:
    """Compile `model`, called as `model(*args, **kwargs)`, into a pipeline.

    `args` and `kwargs` hold one whole batch (dimension 0), which is cut into `microbatches`; with
    `"auto"`, into as many as one, two or four times the devices, whichever is planned shortest.
    What `pipe.step` will be given, `loss_fn` and a batch's `target`, is planned for too; without
    it the loss is taken to cost nothing.
    `devices` is a count, a list, or text such as `"cuda:0,cuda:1"`, `"cpu*4"` and `"cuda:0/4"`.
    `schedule` is gpipe, 1f1b, zb-h1, zb-h2, zb-v, interleaved, bfs or a member of Pfeife's family
    such as `"pfeife:B_l=4,B_f=2"`; `loops`, the stages a device, are 2 under zb-v, interleaved and
    bfs, else 1. Or it is a table of your own, with a row for each device. `checkpoint` is never,
    except_last or always, `solver` dp, beam or cpsat.

    With `schedule="auto"` cuts, stages a device, map and order are searched together for
    `time_limit_s` by `workers` threads, with chance from `seed`; with `checkpoint="auto"` so are
    the parts of stages that are computed again in backward, for a named schedule too. With
    `schedule="cpsat"` half of that time goes to CP-SAT's search for the order of these stages.

    A given `profile` must be of the same model
    and micro-batch; text such as `analytic:h100` has it worked out for that device, and a model
    built `without_memory()` needs that. `progress` is told each pass as it starts.

    `optimizer`, sgd, momentum, adam, adamw, a file that describes one, or an `Optimizer`, says what
    a device holds besides parameters; `memory`, such as `"22GiB"` or a list with an amount for each
    device, how much it may hold, by default what it has. `topology`, such as
    `"4x8:nvlink4/ib400"`, stands for the profile's links. GPUs whose ops are short wait for the
    host, but not in steps that are captured as CUDA graphs, for which `capture` "graph" plans.

    With `allow_graph_breaks`, a model that can't be captured as one graph gives a package of its
    largest part that can: `manifest.part` names it, and `splice` puts it into the model.

    The model is left as it was. Raises an FxpipeError for whatever can't be done, and gives a
    MixedRowsWarning where a micro-batch's rows are not what they are in the whole batch.
    """
    lanes = parse_devices(devices)
    check_settings(microbatches, loops, schedule, checkpoint, solver, time_limit_s, capture)
    counts = microbatch_counts(microbatches, len(lanes), schedule, profile)
    check_rows(batch_of(flat_inputs(model, args, kwargs or {}))[0], min(counts))
    # Refused before the work.
    tables = {count: table_of(schedule, len(lanes), count, loops) for count in counts}
    check_costs(model, profile)
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
    counts = fitting(captured, counts)
    table = tables[counts[0]]
    # Of one that is searched, each device has a stage at least.
    check_blocks(captured, table.n_stages if table else len(lanes) * (loops or 1))
    # What comes after a part of the model is no loss.
    loss = Loss.of(loss_fn, target) if part is None else None
    training_factor = optimizer.training_factor(model.parameters())
    found: list[_Planned] = []
    unfit: list[PlanError] = []
    for count in counts:
        with line("profile"):
            inputs = flat_inputs(model, args, kwargs or {})
            costs = priced(
                captured, model, inputs, profile, count, lanes, loss, apart=network is not None
            )
        with line("linearize"):
            chain = linearize(captured, costs)
        question = Question(
            chain=chain,
            n_devices=len(lanes),
            n_microbatches=count,
            network=costs.network,
            capacity_bytes=room or (costs.capacity_bytes,) * len(lanes),
            training_factor=training_factor,
            checkpoint=checkpoint,
            loops=loops,
            processors=costs.on_processors,
            hosts=Hosts.of(costs.launch) if capture is None else None,
        )
        if network is not None:
            question = question.over(network)
        with line("partition"):
            try:
                plan = planned(
                    question,
                    schedule,
                    tables[count],
                    solver=solver,
                    seed=seed,
                    workers=workers,
                    time_limit_s=time_limit_s / len(counts),
                    progress=lambda ms: progress(f"partition: {ms:.3f} ms"),
                )
                found.append(_Planned(costs, question, plan))
            except PlanError as error:
                unfit.append(error)
    if not found:
        raise unfit[-1]
    best = min(found, key=lambda one: one.plan.estimate.step_ms)
    costs, question, plan = best.profile, best.question, best.plan
    with line("candidates"):
        others = [one for one in found if one is not best]
        candidates = (*(one.candidate for one in others), *weighed_against(question))
    with line("portals"):
        wiring = wire(captured, question.chain, plan)
    with line("emit"):
        manifest, files = emit(
            captured,
            costs,
            plan,
            wiring,
            devices=tuple(map(str, lanes)),
            capacity_bytes=question.capacity_bytes,
        )
    manifest = replace(
        manifest,
        part=None if part is None else part.spec,
        optimizer=OptimizerSpec(str(optimizer), training_factor),
        candidates=candidates,
    )
    # Of a table that was given, nobody knew yet which stages write buffers.
    check(plan.schedule, manifest.stage_to_device, manifest.microbatches, manifest.written)
    if captured.mixed and plan.schedule.n_microbatches > 1:
        warnings.warn(
            f"forward mixes rows of the batch, at {captured.mixed}: a micro-batch has its own rows "
            "alone, so what the pipeline computes is not what the model does of the whole batch, "
            "and `verify` compares it with the model's of each micro-batch. Where it should be of "
            "the whole batch, do that behind the pipeline, or compile with one micro-batch",
            MixedRowsWarning,
            stacklevel=2,
        )
    seconds = line.seconds
    return Package(manifest, captured, costs, question.chain, plan, wiring, files, seconds)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What came of one number of micro-batches."""

    profile: Profile
    question: Question
    plan: Plan

    @property
    def candidate(self) -> CandidateSpec:
        """What is kept of one that is not taken."""
        plan = self.plan
        room = self.question.capacity_bytes
        return candidate(plan.schedule_name, plan.schedule, plan.estimate, room)


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
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
