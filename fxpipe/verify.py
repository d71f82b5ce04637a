"""Compares a package with the plain model: from the same weights, seed and data, the same numbers?

The plain model is run micro-batch by micro-batch, so that batch norm sees the same rows, and each
micro-batch's loss is weighted by its share of the rows, so that gradients are those of the mean.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture.names import all_tensors
from fxpipe.difference import Difference, compare
from fxpipe.errors import InputError
from fxpipe.loss import loss_of
from fxpipe.no_checkpoints import no_checkpoints
from fxpipe.ops.interpret import untouched
from fxpipe.precision import in_precision, set_precision
from fxpipe.runtime import Pipeline, Runner, load
from fxpipe.runtime.backward import differentiable
from fxpipe.runtime.fit import sizes_of
from fxpipe.runtime.leaves import in_mode, places
from fxpipe.runtime.manifest import Manifest, TensorSpec
from fxpipe.runtime.microbatch import bind, merged_dim, unmergeable
from fxpipe.runtime.random import microbatch_seeds
from fxpipe.runtime.structure import describe, rebuild
from fxpipe.target import Target
from fxpipe.verify_part import verify_part

SEED = 0
Named = Mapping[str, Tensor | None]
# How far tensors may be apart relative to their largest element, and which share of their group's
# largest that element counts as at least: the product leaves room for rounding, which grows with
# the sums that a gradient is made of, of some hundred units in the last place.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
NEGLIGIBLE = {"float64": 1e-3, "float32": 1.0}


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
    package: str | Path, target: Target, *, batch: int | None = None, dtype: str = "float64"
) -> Verification:
    """Run the package in the folder `package` and the model of `target`, and compare.

    Training by `step()` and by `backward()`, then evaluation, with `batch` rows (by default what
    the package was planned for) in `dtype`, "float64" or "float32". Raises InputError,
    TargetError, WeightsError and PackageError. A package of a part of the model is spliced into it.
    """
    torch_dtype = getattr(torch, dtype)
    pipe = set_precision(load(package), torch_dtype)
    rows = pipe.manifest.batch if batch is None else batch
    differences: list[Difference] = []

    def note(group: str, found: Named, expected: Named) -> None:
        differences.append(compare(group, found, expected, NEGLIGIBLE[dtype]))

    if pipe.manifest.part is not None:
        verify_part(pipe, target, rows, torch_dtype, SEED, note)
        m = pipe.manifest.microbatches
        return Verification(dtype, rows, m, TOLERANCE[dtype], tuple(differences))
    plain = set_precision(target.build(), torch_dtype)
    case = _case(target, plain, pipe.manifest, rows, torch_dtype)
    start = copy.deepcopy(plain.state_dict())

    @contextmanager
    def fresh(module: nn.Module, training: bool) -> Iterator[None]:
        with untouched(module, dict(all_tensors(module))):
            module.load_state_dict(start)
            module.zero_grad()
            module.train(training)
            torch.manual_seed(SEED)
            yield

    with fresh(plain, training=True):
        outputs = case.run_plain(plain)
        gradients, buffers = _gradients(plain), _buffers(plain)

    with fresh(pipe, training=True):
        note("step(): outputs", case.each(case.step(pipe)), case.each(outputs))
        note("step(): gradients", _gradients(pipe), gradients)
        note("step(): buffers", _buffers(pipe), buffers)

    modes = (True, False) if pipe.manifest.has_eval else (True,)
    apart = {training: unmergeable(pipe.manifest, training) for training in modes}
    if apart[True] is None:
        with fresh(pipe, training=True):
            found = case.run_pipe(pipe)
            note("backward(): outputs", found, case.merged(outputs, training=True))
            note("backward(): gradients", _gradients(pipe), gradients)
            note("backward(): buffers", _buffers(pipe), buffers)

    if False in modes:  # else the pipeline has no eval mode, and says so
        with torch.no_grad():
            with fresh(plain, training=False):
                outputs = case.run_plain(plain)
            with fresh(pipe, training=False):
                if apart[False] is None:
                    found = case.run_pipe(pipe)
                    note("eval(): outputs", found, case.merged(outputs, training=False))
                else:
                    note("eval(): outputs", case.each(case.run_runner(pipe)), case.each(outputs))
    notes = {
        f"{reason}: compared by micro-batch" for reason in apart.values() if reason is not None
    }
    m = pipe.manifest.microbatches
    return Verification(dtype, rows, m, TOLERANCE[dtype], tuple(differences), tuple(sorted(notes)))


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: Any
    rows: int

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies, since a model may write into its inputs."""
        return copy.deepcopy((self.args, self.kwargs))


@dataclass(frozen=True, slots=True)
class _Case:
    """The batch whole and in micro-batches, and how to run either model on it."""

    target: Target
    manifest: Manifest
    whole: _MicroBatch
    parts: tuple[_MicroBatch, ...]

    def run_plain(self, model: nn.Module) -> list[list[Tensor]]:
        """Each micro-batch's outputs; unless gradients are off, the model's are accumulated."""
        by_part = []
        seeds = microbatch_seeds(len(self.parts))
        what = f"forward of {type(model).__name__}, or the loss,"
        with self.target.running(what), no_checkpoints():
            for part, seed in zip(self.parts, seeds, strict=True):
                torch.manual_seed(seed)
                args, kwargs = part.arguments()
                output = model(*args, **kwargs)
                by_part.append([tensor.detach() for tensor in describe(output)[1]])
                if torch.is_grad_enabled():
                    torch.autograd.backward(self.loss(output, part.wanted) * self._share(part))
        return by_part

    def merged(self, by_part: Sequence[Sequence[Tensor]], training: bool) -> dict[str, Tensor]:
        """The batch's outputs by name, put together from the micro-batches'."""
        shares = [self._share(part) for part in self.parts]
        merged = [
            torch.cat(tensors, dim) if dim is not None else _mean(tensors, shares)
            for dim, *tensors in zip(self._batch_dims(training), *by_part, strict=True)
        ]
        return {f"output {k}": tensor for k, tensor in enumerate(merged)}

    def each(self, by_part: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        """The micro-batches' outputs by name."""
        return {
            f"output {k} of micro-batch {i}": tensor
            for i, part in enumerate(by_part)
            for k, tensor in enumerate(part)
        }

    def run_pipe(self, pipe: nn.Module) -> dict[str, Tensor]:
        """Outputs by name; unless gradients are off, the pipe's are accumulated by backward()."""
        args, kwargs = self.whole.arguments()
        output = pipe(*args, **kwargs)
        if torch.is_grad_enabled():
            torch.autograd.backward(self._loss_of_whole(output))
        return {f"output {k}": tensor.detach() for k, tensor in enumerate(describe(output)[1])}

    def step(self, pipe: Pipeline) -> list[list[Tensor]]:
        """One training step by the schedule table; each micro-batch's outputs."""
        by_first_row: dict[int, list[Tensor]] = {}

        def loss(output: Any, target: tuple[Any, Tensor]) -> Tensor:
            wanted, rows = target
            by_first_row[int(rows[0])] = [tensor.detach() for tensor in describe(output)[1]]
            return self.loss(output, wanted)

        args, kwargs = self.whole.arguments()
        target = (self.whole.wanted, torch.arange(self.whole.rows))
        pipe.step(*args, target=target, loss_fn=loss, **kwargs)
        return [outputs for _, outputs in sorted(by_first_row.items())]

    def run_runner(self, pipe: Pipeline) -> list[list[Tensor]]:
        """Each micro-batch's outputs, without gradients."""

        def closure(place: Tensor) -> list[Tensor]:
            args, kwargs = self.parts[int(place)].arguments()
            return describe(pipe(*args, **kwargs))[1]

        m = len(self.parts)
        return Runner(m).step(closure, torch.arange(m))

    def loss(self, output: Any, wanted: Any) -> Tensor:
        """The loss of one output."""
        return loss_of(self.target, output, wanted)

    def _loss_of_whole(self, output: Any) -> Tensor:
        """The micro-batches' losses, weighted; of the whole where outputs can't be divided."""
        structure, tensors = describe(output)
        dims = self._batch_dims(training=True)
        if None in dims:
            return self.loss(output, self.whole.wanted)
        specs = self._specs(training=True)
        divided = [
            torch.split(tensor, [spec.sizes(self._sizes(part))[dim] for part in self.parts], dim)
            for tensor, spec, dim in zip(tensors, specs, dims, strict=True)
            if dim is not None
        ]
        losses = [
            self.loss(rebuild(structure, tensors_of_part), part.wanted) * self._share(part)
            for part, *tensors_of_part in zip(self.parts, *divided, strict=True)
        ]
        return torch.stack(losses).sum()

    def _share(self, part: _MicroBatch) -> float:
        return part.rows / self.whole.rows

    def _sizes(self, part: _MicroBatch) -> dict[str, int]:
        given = bind(self.manifest, part.args, part.kwargs)
        return sizes_of(self.manifest, given) | {"batch": part.rows}

    def _specs(self, training: bool) -> list[TensorSpec]:
        """Of each output tensor, what is known of it."""
        structure = in_mode(self.manifest.output_structure, training)
        return [self.manifest.outputs[place].spec for place in places(structure)]

    def _batch_dims(self, training: bool) -> list[int | None]:
        """Of each output tensor, the dimension that grows with the batch."""
        return [merged_dim(spec) for spec in self._specs(training)]


def _case(
    target: Target, plain: nn.Module, manifest: Manifest, rows: int, dtype: torch.dtype
) -> _Case:
    m = manifest.microbatches
    if rows < m:
        raise InputError(
            f"a batch of {rows} can't be divided into the {m} micro-batches of this package: "
            f"verify with --batch {m} or more"
        )
    made = target.inputs(rows)
    target.check_rows(made, rows, plain)
    # In the order of the signature, in which the manifest lists the inputs.
    kwargs = {name: made.kwargs[name] for name in manifest.signature if name in made.kwargs}
    structure, tensors = describe(((made.args, {**kwargs, **made.kwargs}), target.targets(rows)))
    tensors = [in_precision(tensor, dtype) for tensor in tensors]
    batched = [spec.batched for spec in manifest.inputs]
    if len(batched) > len(tensors):
        raise InputError(
            f"{target.name} gives {len(tensors)} input tensors, the package takes {len(batched)}: "
            "compile it again from this TARGET"
        )
    batched += [t.dim() > 0 and t.size(0) == rows for t in tensors[len(batched) :]]
    divided = [
        t.tensor_split(m) if split else (t,) * m for t, split in zip(tensors, batched, strict=True)
    ]
    sizes = [len(part) for part in torch.arange(rows).tensor_split(m)]

    def microbatch(tensors: Sequence[Tensor], n_rows: int) -> _MicroBatch:
        (args, kwargs), wanted = rebuild(structure, tensors)
        return _MicroBatch(args, kwargs, wanted, n_rows)

    parts = tuple(map(microbatch, zip(*divided, strict=True), sizes))
    return _Case(target, manifest, microbatch(tensors, rows), parts)


def _mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    if not differentiable(tensors[0]):
        return tensors[-1]
    return torch.stack([t * share for t, share in zip(tensors, shares, strict=True)]).sum(0)


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _buffers(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of those in the state_dict; others are values that the model computes anew."""
    state = model.state_dict()
    return {name: b.detach().clone() for name, b in model.named_buffers() if name in state}
