"""What runs a compiled model: its micro-batches through the stages, a lane for each device."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from fxpipe.errors import InputError
from fxpipe.runtime import microbatch, stream, ties
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.call import Call
from fxpipe.runtime.components import ALL, Components
from fxpipe.runtime.copy import Links, new_copy_streams
from fxpipe.runtime.end import End, LossFn, Objective
from fxpipe.runtime.gate import Gate, Needs, needs
from fxpipe.runtime.graph import Graphs
from fxpipe.runtime.imports import unpickled
from fxpipe.runtime.lanes import Lanes
from fxpipe.runtime.leaves import in_mode
from fxpipe.runtime.manifest import Manifest, there
from fxpipe.runtime.memory import Memory
from fxpipe.runtime.portal import CALLER, Wire, Wires, source_of
from fxpipe.runtime.random import RandomStream, microbatch_seeds
from fxpipe.runtime.recorder import Trace
from fxpipe.runtime.room import check_room
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.step import Step
from fxpipe.runtime.stream import Device, Stream
from fxpipe.runtime.structure import Structure
from fxpipe.runtime.transforms import refuse_transforms
from fxpipe.runtime.turn import Turn
from fxpipe.runtime.weights.original import Original
from fxpipe.schedule import Action, Schedule, clock_order


@dataclass(frozen=True, slots=True)
class Workers:
    """What the first call makes: the lanes, and a copy stream per lane and micro-batch."""

    lanes: Lanes
    copies: Sequence[Sequence[Stream]]


@dataclass(frozen=True, slots=True)
class Visit:
    """A closure's call of a pipeline: the inputs by value, and the settings it was made under."""

    pipe: "Engine"
    piece: Mapping[str, Tensor]
    ambient: Ambient


class Engine(Original):
    """Begins calls and steps, runs their jobs on the lanes, and puts together what comes out.

    What users call is in `Pipeline`.
    """

    def __init__(
        self,
        manifest: Manifest,
        schedule: Schedule,
        stages: Sequence[Stage],
        devices: Sequence[Device],
        buffers: Mapping[str, Tensor],
        components: Components = ALL,
        capture: str | None = None,
        elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        if capture not in (None, "graph"):
            raise InputError(f"there is no capture {capture!r}: graph, or None")
        manifest, stages = components.applied(manifest, stages)
        super().__init__(manifest.state, stages, devices, buffers, elsewhere)
        self._components = components
        self._manifest = manifest
        self._schedule = schedule
        self._estimate = manifest.estimate
        self._needs: dict[int, Needs] = {}  # by number of micro-batches
        self._wires = {training: Wires.of(manifest, training) for training in (True, False)}
        self._outputs = [Wire(source_of(o.stage), o.value) for o in manifest.outputs]
        self._workers: Workers | None = None
        self._turn = Turn()
        self._trace: Trace | None = None
        self._memory: Memory | None = None
        self._first_lane = 0  # of this process, among the package's
        self._fits = 0  # rows of a micro-batch that are known to fit
        self._captures = capture is not None
        self._graphs: Graphs | None = None

    @property
    def manifest(self) -> Manifest:
        """What is known of the package."""
        return self._manifest

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices it runs on, one lane each."""
        return self._devices

    def __reduce__(self) -> tuple[Any, ...]:
        """The stages' classes are its package's, which is found before anything else is read."""
        stage = self._stages[0]
        package = type(stage.module).__module__.partition(".")[0]
        made = type(self), str(Path(stage.path).parent), package
        return unpickled, made, self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        """All but what runs it, so that `copy.deepcopy` works."""
        return self.__dict__ | dict.fromkeys(("_workers", "_trace", "_memory", "_graphs"))

    def _structure(self) -> Structure:
        return in_mode(self._manifest.output_structure, self.training)

    def _inputs(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Tensor]:
        """The call's tensors."""
        refuse_transforms()
        self._refuse_inside()
        microbatch.refuse_other_mode(self._manifest, self.training)
        return microbatch.bind(self._manifest, args, kwargs)

    def _refuse_inside(self) -> None:
        """Raise InputError if a call of this pipeline is made from within one."""
        if self._workers is not None and self._workers.lanes.are_here:
            self._workers.lanes.refuse_inside()

    def _refuse_step(self) -> None:
        """Raise InputError without gradients, and for hooks of the pipeline, which calls run."""
        if not torch.is_grad_enabled():
            mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
            raise InputError(f"step computes gradients: call it outside of torch.{mode}()")
        for kind in ("forward_pre", "forward", "backward_pre", "backward"):
            if getattr(self, f"_{kind}_hooks"):
                raise InputError(
                    f"the pipeline has a {kind.replace('_', '-')} hook, which step can't run: it "
                    "never has the whole batch's output. Let the loss function do what the hook "
                    "does, or train by a Runner, whose closures call the pipeline"
                )

    def _begin(self, inputs: Sequence[Tensor]) -> tuple[list[int], Call]:
        """The micro-batches' rows, and what the call's lanes share."""
        rows = microbatch.rows_of(self._manifest, inputs, self._manifest.microbatches)
        call = self._new_call(len(rows))
        seeds = microbatch_seeds(call.m) if call.draws else []
        for i, piece in enumerate(microbatch.scatter(self._manifest, inputs, rows)):
            call.enter(i, piece, RandomStream(seeds[i]) if seeds else None)
        return rows, call

    def _step(
        self,
        run: Callable[[Step, Call], None],
        inputs: Sequence[Tensor],
        target: Any,
        loss_fn: LossFn,
        scaler: GradScaler | None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The loss of a step whose table `run` runs, and the gradients of its inputs."""
        rows, call = self._begin(inputs)
        step, objective = self._new_step(call, rows, sum(rows), target, loss_fn, scaler)
        run(step, call)
        return objective.loss(), self._input_gradients(step, inputs, rows)

    def _new_step(
        self,
        call: Call,
        rows: Sequence[int],
        batch: int,
        target: Any,
        loss_fn: LossFn,
        scaler: GradScaler | None,
    ) -> tuple[Step, Objective]:
        """What runs the actions of micro-batches of `rows`, and the loss, a mean over `batch`."""
        self._check_room(max(rows))
        targets = microbatch.split_target(target, rows)
        end = End(call, self._outputs, self._structure())
        objective = Objective(loss_fn, targets, [n / batch for n in rows], end, scaler)
        device = call.device(call.n)
        return Step(call, lambda i: objective.run(i, device), self._schedule.split), objective

    def _input_gradients(
        self, step: Step, inputs: Sequence[Tensor | None], rows: Sequence[int]
    ) -> list[Tensor | None]:
        """What the stages here found for each input; None for one that isn't here."""
        return [
            None if tensor is None else step.input_gradient(spec, tensor, rows)
            for spec, tensor in zip(self._manifest.inputs, inputs, strict=True)
        ]

    def _check_room(self, rows: int) -> None:
        """Raise ScheduleError if micro-batches of so many rows don't fit; asked for once."""
        if rows > self._fits:
            planned = -(-self._manifest.batch // self._manifest.microbatches)
            room = stream.capacities(self._devices)
            factor = self._manifest.optimizer.factor
            check_room(self._schedule, self._stages, room, rows / planned, factor)
            self._fits = rows

    def _merged(
        self, call: Call, inputs: Sequence[Tensor | None], rows: Sequence[int]
    ) -> list[Any]:
        """The leaves of the model's output, from the micro-batches' at the call's end."""
        given = zip(self._manifest.inputs, inputs, strict=True)
        whole = {Wire(CALLER, spec.value): tensor for spec, tensor in given}
        for wire, output in zip(self._outputs, self._manifest.outputs, strict=True):
            if wire not in whole and there(output.mode, self.training):
                pieces = [call.value(wire, call.n, i)[0] for i in range(call.m)]
                whole[wire] = microbatch.gather(output, pieces, rows)
        return [whole.get(wire) for wire in self._outputs]

    def _new_call(self, m: int) -> Call:
        links = self._new_links(m)
        return Call(self._stages, self._wires[self.training], links, len(self._devices), m)

    def _new_links(self, m: int) -> Links:
        self._follow()
        self._state.begin(m)
        if self._workers is None or not self._workers.lanes.are_here:
            streams = new_copy_streams(self._devices, self._manifest.microbatches)
            self._workers = Workers(Lanes(self._devices), streams)
        copies = self._workers.copies
        if not self._components.streams:
            copies = [[stream.current_stream(device)] * m for device in self._devices]
        return Links(self._devices, copies)

    def _run_table(self, step: Step, call: Call) -> None:
        table = self._schedule.first(call.m)
        if call.m not in self._needs:
            self._needs[call.m] = needs(self._estimate, self._schedule, call.m)
        call.hold_back(Gate(self._needs[call.m], len(table.rows)))
        self._run_rows(step, call, table.rows)

    def _run_in_order(self, step: Step, call: Call) -> None:
        """Run the table on this thread alone, as a CUDA graph is captured."""
        with (
            ties.collected(self._state.ties, self._state.parameters(self), self._memory),
            stream.joined(self._devices),
        ):
            for action in clock_order(self._schedule.first(call.m)):
                lane = call.lane(action.stage)
                with stream.use_streams([stream.current_stream(self._devices[lane])]):
                    step.run_row(lane, [action])
        self._state.take_buffers()

    def _run_rows(
        self,
        step: Step,
        call: Call,
        rows: Sequence[Sequence[Action]],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        if self._trace is not None:
            call.record(self._trace.recorder())
        with ties.collected(self._state.ties, self._state.parameters(self), self._memory):
            jobs = [partial(step.run_row, lane, row) for lane, row in enumerate(rows)]
            self._run(jobs, call, meanwhile)

    def _run(
        self,
        jobs: Sequence[Callable[[], None]],
        call: Call,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        assert self._workers is not None
        if self._memory is not None:
            jobs = self._memory.counted(jobs)
            call.count(self._memory)
        try:
            with stream.joined(self._devices):
                self._workers.lanes.run(jobs, call.stop, meanwhile)
        finally:
            self._state.take_buffers()

    def _visit(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Visit:
        inputs = self._inputs(args, kwargs)
        rows = microbatch.rows_of(self._manifest, inputs, 1)
        (piece,) = microbatch.scatter(self._manifest, inputs, rows)
        return Visit(self, piece, Ambient.capture())

    def _spliced(self) -> None:
        """A model runs around it from now on, with which it shares what it holds."""

    def _beside_replicas(
        self, rows: int, around: Sequence[Tensor] | None
    ) -> AbstractContextManager[float]:
        """For a runner's step: gives the share of its rows in those of all replicas, here one.

        When the block ends, gradients of `around` have the sum over the replicas.
        """
        return nullcontext(1.0)

    def _new_visits(self, first: Visit, m: int) -> Call:
        """The call that a runner's closures enter; `first` is what micro-batch 0 gives."""
        return self._new_call(m)

    def _run_visits(self, call: Call, table: Schedule, conduct: Callable[[], None]) -> None:
        """Run the table while `conduct` runs the closures."""
        with self._turn:
            self._run_rows(Step(call, lambda i: None, table.split), call, table.rows, conduct)
