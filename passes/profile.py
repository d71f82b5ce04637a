"""Op profiling: what each op costs forward and backward, and the bytes that backward keeps.

Ops are timed one by one, then scaled by what the whole graph takes: what lies between ops (cold
caches, allocation, gradients added up) belongs to no op, but to the step that is predicted.
"""

import copy
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.costs.criterion import Criterion
from fxpipe.costs.first_microbatch import first_microbatch, microbatch
from fxpipe.costs.libraries import drop_workspaces
from fxpipe.costs.links import measure_network
from fxpipe.costs.meter import Meter
from fxpipe.costs.op_backward import backward_ms
from fxpipe.costs.overhead import action_ms
from fxpipe.costs.stopwatch import StopWatch
from fxpipe.costs.unknown import Unknown
from fxpipe.costs.whole import Whole, whole_ms
from fxpipe.costs.whole_gpu import whole_on_gpus
from fxpipe.ir import Capture, Launch, LossCost, OpCost, Profile
from fxpipe.ops.interpret import DTYPE, TRAINING, Hook, plainly, run_graph, untouched
from fxpipe.runtime.stream import (
    Device,
    capacities,
    current_stream,
    place,
    threads_per_lane,
    use_streams,
)
from fxpipe.runtime.virtual import VirtualDevice


class _Found(NamedTuple):
    """The costs of ops and loss, what each action adds, what a host takes, what libraries hold."""

    costs: dict[str, OpCost]
    loss: LossCost | None
    action_ms: float = 0.0
    launch: Launch | None = None
    library_bytes: int = 0


def profile(
    capture: Capture,
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    n_microbatches: int,
    devices: Sequence[Device],
    criterion: Criterion | None = None,
    apart: bool = False,
) -> Profile:
    """Run the graph on one micro-batch of `inputs` and measure each kind of op, and the loss.

    Times are those of `devices[0]`, with the threads that one lane has, while other lanes are as
    busy as in a step, unless they are `apart`, each in a process of its own. Raises InputError if
    there are more micro-batches than rows, or if the model does not take so few; as a step does, if
    the criterion is none.
    """
    device = place(devices[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_per_lane(devices))
    try:
        with (
            first_microbatch(capture, inputs, n_microbatches) as largest,
            untouched(model, capture.state),
            use_streams([current_stream(devices[0])]),
        ):
            given = [tensor.to(device) for tensor in largest]
            model.train()
            smallest = microbatch(capture, inputs, n_microbatches, -1)
            if [t.shape for t in smallest] != [t.shape for t in largest]:
                _run(capture, smallest, device)  # a batch norm, for one, may have too few rows
            if criterion is not None:
                criterion = criterion.moved(lambda tensor: tensor.to(device))
            measure = partial(_on_lanes, apart=apart) if device.type == "cpu" else _on_gpus
            found = measure(capture, given, devices, criterion)
            unknown = Unknown(capture)
            for i in range(n_microbatches if unknown.names else 0):
                _run(capture, microbatch(capture, inputs, n_microbatches, i), device, unknown)
    finally:
        torch.set_num_threads(threads)
    return Profile(
        costs={name: unknown.at_most(cost) for name, cost in found.costs.items()},
        network=measure_network(devices),
        device=str(devices[0]),
        capacity_bytes=min(capacities(devices)),
        batch=-(-capture.batch // n_microbatches),
        fingerprint=capture.fingerprint,
        action_ms=found.action_ms,
        loss=found.loss,
        launch=found.launch,
        library_bytes=found.library_bytes,
        unknown_bytes=unknown.bytes,
    )


def _on_lanes(
    capture: Capture,
    given: Sequence[Tensor],
    devices: Sequence[Device],
    criterion: Criterion | None,
    apart: bool,
) -> _Found:
    """On CPU lanes, of which each action takes its time, and no host any."""
    cpus = [lane for lane in devices if place(lane).type == "cpu"]
    spells = [whole_ms(capture, given, devices, criterion, apart)]
    costs, loss = _measure(capture, given, place(devices[0]), criterion)
    spells.append(whole_ms(capture, given, devices, criterion, apart))
    overhead_ms = action_ms(devices[:1] if apart else cpus)
    spells.append(whole_ms(capture, given, devices, criterion, apart))
    # What else a machine does comes in spells: of three, one that is slow says nothing.
    whole = Whole(*map(statistics.median, zip(*spells, strict=True)))
    return _Found(*_like(whole, costs, loss), overhead_ms)


def _on_gpus(
    capture: Capture,
    given: Sequence[Tensor],
    devices: Sequence[Device],
    criterion: Criterion | None,
) -> _Found:
    """On GPUs, which a host launches.

    Of several GPUs the first may be too small for the whole model, of which nothing is known then;
    the parts of one share it.
    """
    gpu = place(devices[0])
    drop_workspaces(gpu)
    costs, loss = _measure(capture, given, gpu, criterion)
    held = drop_workspaces(gpu)
    in_parts = all(isinstance(lane, VirtualDevice) for lane in devices)
    measured = whole_on_gpus(capture, given, devices if in_parts else devices[:1], criterion)
    launch = None
    if measured is not None:
        whole, launch = measured
        costs, loss = _like(whole, costs, loss)
        launch = dataclasses.replace(launch, action_ms=action_ms(devices[:1]))
    drop_workspaces(gpu)  # of a thread that is none of the lanes'
    return _Found(costs, loss, launch=launch, library_bytes=held)


def _measure(
    capture: Capture,
    given: Sequence[Tensor],
    device: torch.device,
    criterion: Criterion | None,
) -> tuple[dict[str, OpCost], LossCost | None]:
    clock = StopWatch(device)
    tiny = torch.ones(1, device=device, requires_grad=True)
    modules, state = _moved(capture, device)
    engine_ms = backward_ms(clock, tiny + 0, [tiny])
    meter = Meter(capture, modules, device, clock, engine_ms)
    outputs = run_graph(capture.graph, modules, state, [tensor.clone() for tensor in given], meter)
    return meter.costs, criterion.cost(outputs, clock, device) if criterion else None


def _run(
    capture: Capture, given: Sequence[Tensor], device: torch.device, hook: Hook = plainly
) -> None:
    """Run the graph on `given`, with a `hook` around each op."""
    with torch.no_grad():
        own = [tensor.to(device, copy=True) for tensor in given]
        run_graph(capture.graph, *_moved(capture, device), own, hook)


def _moved(
    capture: Capture, device: torch.device
) -> tuple[Mapping[str, nn.Module], Mapping[str, Any]]:
    """Modules and state for a run of the graph in train mode on `device`."""
    attributes = {**capture.state, TRAINING: True, DTYPE: capture.dtype}
    return _Moved(capture.modules, device), _Moved(attributes, device)


def _like(
    whole: Whole, costs: Mapping[str, OpCost], loss: LossCost | None
) -> tuple[dict[str, OpCost], LossCost | None]:
    """Costs of ops and loss that come to those of the whole."""
    return _scaled(costs, whole), loss and dataclasses.replace(loss, ms=whole.loss_ms)


def _scaled(costs: Mapping[str, OpCost], whole: Whole) -> dict[str, OpCost]:
    """The same costs in proportion, with these sums; halving costs each op's backward as much.

    In all it costs no more than another backward, whatever was measured.
    """
    forward = whole.forward_ms / (sum(cost.forward_ms for cost in costs.values()) or 1.0)
    backward = whole.backward_ms / (sum(cost.backward_ms for cost in costs.values()) or 1.0)
    halved = sum(cost.backward_ms > 0 for cost in costs.values()) or 1
    halving_ms = min(max(0.0, whole.halves_ms - whole.backward_ms), whole.backward_ms) / halved
    return {
        name: dataclasses.replace(
            cost,
            forward_ms=cost.forward_ms * forward,
            backward_ms=cost.backward_ms * backward,
            weight_gradient_ms=cost.weight_gradient_ms * backward,
            halving_ms=halving_ms if cost.backward_ms > 0 else 0.0,
        )
        for name, cost in costs.items()
    }


class _Moved(Mapping[str, Any]):
    """Modules or tensors, each moved only when asked for: the whole may not fit on the device.

    The last one is kept, which is asked for more than once.
    """

    def __init__(self, held: Mapping[str, Any], device: torch.device) -> None:
        self._held = held
        self._device = device
        self._last: tuple[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        if self._last is None or self._last[0] != name:
            self._last = None  # to make room
            self._last = name, self._moved(self._held[name])
        return self._last[1]

    def _moved(self, found: Any) -> Any:
        if isinstance(found, nn.Module) and self._device.type != "cpu":
            return copy.deepcopy(found).to(self._device)
        return found.to(self._device) if isinstance(found, Tensor) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)
