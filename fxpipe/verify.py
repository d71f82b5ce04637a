"""Compares a package with the plain model: from equal weights, seed and data, equal numbers?"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import OutOfMemoryError, Tensor, nn

from fxpipe.capture.names import all_tensors
from fxpipe.difference import Difference, compare
from fxpipe.edits import PLAN, edits
from fxpipe.errors import InputError, StageError, TargetError
from fxpipe.ops.interpret import untouched
from fxpipe.precision import set_precision
from fxpipe.runtime import load
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.microbatch import unmergeable
from fxpipe.runtime.stream import Devices, place
from fxpipe.target import Target
from fxpipe.verify_case import Case, case_of, is_of_dtypes
from fxpipe.verify_part import verify_part

SEED = 0
Named = Mapping[str, Tensor | None]
# How far tensors may be apart relative to their largest element, and which share of their group's
# largest that element counts as at least: the product leaves room for rounding, which grows with
# the sums that a gradient is made of, of some hundred units in the last place.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
NEGLIGIBLE = {"float64": 1e-3, "float32": 1.0}
_SAME_LOSS = 1e-4  # as shares of a loss go, not as rounding does


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared, and how far it is apart; `notes` say what was compared in another way."""

    dtype: str
    batch: int
    microbatches: int
    tolerance: float
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every group lies within the tolerance and misses nothing."""
        return all(d.relative <= self.tolerance and not d.missing for d in self.differences)


def verify(
    package: str | Path,
    target: Target,
    *,
    batch: int | None = None,
    dtype: str = "float64",
    devices: Devices | None = None,
) -> Verification:
    """Run the package in the folder `package` and the model of `target`, and compare.

    Training by `step()` and by `backward()`, then evaluation, with `batch` rows (by default what
    the package was planned for) in `dtype`, "float64" or "float32". The package runs on `devices`
    if given, the model where the last stage does: another device draws and rounds otherwise. Raises
    InputError, also where the model is too large for that, TargetError, WeightsError, PackageError
    and DeviceError. A package of a part of the model is spliced into it.
    """
    torch_dtype = getattr(torch, dtype)
    pipe = load(package, devices)
    _refuse_other_dtype(pipe.manifest, dtype)
    set_precision(pipe, torch_dtype)
    rows = pipe.manifest.batch if batch is None else batch
    device = place(pipe.devices[-1])
    differences: list[Difference] = []

    def note(group: str, found: Named, expected: Named) -> None:
        differences.append(compare(group, found, expected, NEGLIGIBLE[dtype]))

    if pipe.manifest.part is not None:
        with _whole_on(device):
            verify_part(pipe, target, rows, torch_dtype, device, SEED, note)
        m = pipe.manifest.microbatches
        return Verification(dtype, rows, m, TOLERANCE[dtype], tuple(differences))
    with _whole_on(device):
        plain = set_precision(target.build(), torch_dtype).to(device)
    case = case_of(target, plain, pipe.manifest, rows, torch_dtype, device)
    start = copy.deepcopy(plain.state_dict())
    as_planned = PLAN not in edits(package).edited  # else it may have other parameters

    @contextmanager
    def fresh(module: nn.Module, training: bool) -> Iterator[None]:
        with untouched(module, dict(all_tensors(module))), _told_of_dtype(dtype):
            module.load_state_dict(start, strict=as_planned or module is plain)
            module.zero_grad()
            module.train(training)
            torch.manual_seed(SEED)
            yield

    with fresh(plain, training=True), _whole_on(device):
        outputs = case.run_plain(plain)
        gradients, buffers = _gradients(plain), _buffers(plain)

    with fresh(pipe, training=True):
        note("step(): outputs", case.each(case.step(pipe)), case.each(outputs))
        note("step(): gradients", _gradients(pipe), gradients)
        note("step(): buffers", _buffers(pipe), buffers)

    modes = (True, False) if pipe.manifest.has_eval else (True,)
    apart = {training: unmergeable(pipe.manifest, training) for training in modes}
    notes = {f"{reason}: compared by micro-batch" for reason in apart.values() if reason}
    if apart[True] is None:
        with fresh(pipe, training=True):
            found = case.run_pipe(pipe, outputs)
            note("backward(): outputs", found, case.merged(outputs, training=True))
            note("backward(): gradients", _gradients(pipe), gradients)
            note("backward(): buffers", _buffers(pipe), buffers)

    if False in modes:  # else the pipeline has no eval mode, and says so
        with torch.no_grad():
            with fresh(plain, training=False):
                outputs = case.run_plain(plain)
            if not notes:
                with fresh(plain, training=False):
                    notes |= _no_means(case, plain, outputs)
            with fresh(pipe, training=False):
                if apart[False] is None:
                    found = case.run_pipe(pipe, outputs)
                    note("eval(): outputs", found, case.merged(outputs, training=False))
                else:
                    note("eval(): outputs", case.each(case.run_runner(pipe)), case.each(outputs))
    m = pipe.manifest.microbatches
    result = Verification(dtype, rows, m, TOLERANCE[dtype], tuple(differences))
    if not result.equal and replace(result, tolerance=TOLERANCE["float32"]).equal:
        notes.add(
            "what differs does so by no more than float32 rounds: if the model computes in it in "
            "places, as norms do, verify with --dtype float32"
        )
    return replace(result, notes=tuple(sorted(notes)))


@contextmanager
def _told_of_dtype(dtype: str) -> Iterator[None]:
    """A stage that fails in float64 since dtypes differ may run in float32."""
    try:
        yield
    except StageError as error:
        if dtype != "float64" or not is_of_dtypes(error):
            raise
        raise StageError(
            f"{error}\nA tensor that is neither a parameter nor a buffer stays in the dtype that "
            "it was compiled in: verify with --dtype float32, or register it as a buffer"
        ) from error


def _no_means(case: Case, plain: nn.Module, outputs: Sequence[Sequence[Tensor]]) -> set[str]:
    """A note where micro-batches' losses don't come to the batch's: `step` trains by another."""
    try:
        means = case.means(plain, outputs)
    except (OutOfMemoryError, TargetError) as error:
        if not _is_out_of_memory(error):
            raise
        return set()  # micro-batches hold less
    return {
        f"{what} of the batch is {whole:.6g}, the mean of its micro-batches' by rows, which step() "
        f"trains by, {mean:.6g}: it is no mean over rows (README, Train), or rows of the batch "
        "depend on each other"
        for what, (whole, mean) in means.items()
        if not math.isclose(whole, mean, rel_tol=_SAME_LOSS, abs_tol=_SAME_LOSS)
    }


@contextmanager
def _whole_on(device: torch.device) -> Iterator[None]:
    """The block runs the whole model on `device`. Raises InputError if its memory is too small."""
    try:
        yield
    except (OutOfMemoryError, TargetError) as error:
        if not _is_out_of_memory(error):
            raise
        raise InputError(
            f"the whole model, with which the package is compared, takes more memory than {device} "
            "has: verify on lanes of the CPU, with --devices as in cpu*2"
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error.__cause__ or error, OutOfMemoryError)


def _refuse_other_dtype(manifest: Manifest, dtype: str) -> None:
    only = manifest.only_dtype
    if only not in (None, dtype):
        raise InputError(
            f"{manifest.model} runs other ops in {dtype} than in {only}, for which the package "
            f"was compiled: verify with --dtype {only}, or compile the model in {dtype}"
        )


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _buffers(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of those in the state_dict; others are values that the model computes anew."""
    state = model.state_dict()
    return {name: b.detach().clone() for name, b in model.named_buffers() if name in state}
