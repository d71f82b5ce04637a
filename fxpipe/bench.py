"""Runs steps of a package, and puts what they took beside what was predicted."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.loss import loss_of, own_loss
from fxpipe.runtime import Pipeline, load
from fxpipe.runtime.manifest import Manifest, TensorSpec
from fxpipe.runtime.stream import Devices, synchronize
from fxpipe.runtime.structure import rebuild
from fxpipe.show import measured as traces
from fxpipe.show import view
from fxpipe.show.comparison import PEAK, STEP, Figure, compare, figures
from fxpipe.show.texts import devices_text, ms_text
from fxpipe.show.view import View
from fxpipe.target import Target

_WARM_UP = 2
_SEED = 0


@dataclass(frozen=True, slots=True)
class Bench:
    """What was compared; `notes` say where the two sides are not of the same thing."""

    steps: int
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()


def bench(
    package: str | Path, target: Target | None = None, *, steps: int, devices: Devices | None = None
) -> Bench:
    """Run training steps of the package in the folder `package`, on `devices` if given.

    The batch is as it was planned for. With a `target`, inputs, weights and loss are its own, else
    random, the package's, and a mean of the outputs. Steps are timed as a whole, as many again are
    traced for all that is inside of them, and one more is run to count memory; of times, the
    medians are kept. Raises InputError, TargetError, PackageError, DeviceError and StageError.
    """
    pipe = load(package, devices)
    expected = view.predicted(pipe.manifest)
    run = _step_of(pipe, target)
    for _ in range(_WARM_UP):
        run()
    seconds = [_seconds(pipe, run) for _ in range(steps)]
    with tempfile.TemporaryDirectory() as folder:
        traces = [_traced(pipe, run, Path(folder) / "step.json") for _ in seconds]
    measured = [
        {**figures(trace), STEP: 1e3 * taken} for trace, taken in zip(traces, seconds, strict=True)
    ]
    with pipe.memory() as memory:
        run()
    predicted = figures(expected)
    for peak in memory.peaks:
        key = (f"device {', '.join(map(str, peak.lanes))}", PEAK)
        predicted[key] = peak.predicted_bytes
        if peak.measured_bytes is not None:
            measured[0][key] = peak.measured_bytes
    notes = tuple(_notes(pipe, expected, traces[0], target))
    return Bench(steps, compare(predicted, measured), notes)


def _step_of(pipe: Pipeline, target: Target | None) -> Callable[[], object]:
    """One training step, as a call without arguments."""
    manifest = pipe.manifest
    if target is None:
        args, kwargs = _random(manifest)
        return partial(pipe.step, *args, loss_fn=lambda output, _: own_loss(output), **kwargs)
    if manifest.part is not None:
        raise InputError(
            f"the package is of a part of the model, {', '.join(manifest.part.modules)}, which "
            f"takes other inputs than {target.name} makes: leave TARGET out, for random ones"
        )
    model = target.build()
    pipe.load_state_dict(model.state_dict())
    inputs = target.inputs(manifest.batch, model)
    wanted = target.targets(manifest.batch)

    def run() -> None:
        with target.running("the loss"):
            pipe.step(
                *inputs.args,
                target=wanted,
                loss_fn=lambda output, wanted: loss_of(target, output, wanted),
                **inputs.kwargs,
            )

    return run


def _random(manifest: Manifest) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments of one batch, as the model's forward takes them."""
    torch.manual_seed(_SEED)
    sizes = {**manifest.sizes, "batch": manifest.batch}
    tensors = [_random_tensor(given.spec, sizes) for given in manifest.inputs]
    given: dict[str, Any] = rebuild(manifest.input_structure, tensors)
    rest = next((name for name in manifest.signature if name.startswith("*")), None)
    if rest is None or rest[1:] not in given:
        return (), given
    named = manifest.signature[: manifest.signature.index(rest)]
    return [*(given.pop(name) for name in named), *given.pop(rest[1:])], given


def _random_tensor(spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    """Normal floats; of whole numbers 0 and 1, which are places in any table; masks that pass."""
    shape, dtype = spec.sizes(sizes), spec.torch_dtype
    if dtype is torch.bool:
        return torch.ones(shape, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, requires_grad=spec.requires_grad)
    return torch.randint(2, shape, dtype=dtype)


def _seconds(pipe: Pipeline, run: Callable[[], object]) -> float:
    for device in pipe.devices:
        synchronize(device)
    start = time.perf_counter()
    run()
    for device in pipe.devices:
        synchronize(device)
    return time.perf_counter() - start


def _traced(pipe: Pipeline, run: Callable[[], object], file: Path) -> View:
    with pipe.trace(file):
        run()
    return traces.measured(pipe.manifest, [file])


def _notes(pipe: Pipeline, expected: View, ran: View, target: Target | None) -> Iterator[str]:
    planned_ms = pipe.manifest.estimate.loss_ms
    if target is None and planned_ms:
        yield (
            f"the loss was a mean of the outputs, predicted is one of {ms_text(planned_ms)}: give "
            "the TARGET it is of"
        )
    if target is not None and target.loss is not None and not planned_ms:
        yield "the package was planned without a loss"
    compiled, here = pipe.manifest.devices, tuple(map(str, pipe.devices))
    if here != compiled:
        yield f"ran on {devices_text(here)}, predicted for {devices_text(compiled)}"
    if _order(ran) != _order(expected):
        yield "schedule.csv was edited: what is predicted is the schedule that was compiled"


def _order(of: View) -> list[list[str]]:
    return [[e.name for _, e in of.actions if e.lane == lane] for lane in range(len(of.lanes))]
