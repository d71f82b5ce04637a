"""The batch that a package and the plain model are compared on, and how to run either on it.

The plain model is run micro-batch by micro-batch, so that batch norm sees the same rows, and each
micro-batch's loss is weighted by its share of the rows, so that gradients are those of the mean.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import FxpipeError, InputError, TargetError
from fxpipe.loss import loss_of
from fxpipe.no_checkpoints import no_checkpoints
from fxpipe.precision import in_precision
from fxpipe.runtime import Pipeline, Runner
from fxpipe.runtime.backward import differentiable
from fxpipe.runtime.leaves import in_mode, places
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.microbatch import merged_dim
from fxpipe.runtime.random import microbatch_seeds
from fxpipe.runtime.structure import describe, rebuild
from fxpipe.target import Target

# What torch says of numbers that it has no kernel for, or that are not alike.
_OF_DTYPES = re.compile("dtype|scalar type|float|double", re.IGNORECASE)


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
class Case:
    """The batch whole and in micro-batches, and how to run either model on it."""

    target: Target
    manifest: Manifest
    dtype: torch.dtype
    whole: _MicroBatch
    parts: tuple[_MicroBatch, ...]

    def run_plain(self, model: nn.Module) -> list[list[Tensor]]:
        """Each micro-batch's outputs; unless gradients are off, the model's are accumulated."""
        by_part = []
        seeds = microbatch_seeds(len(self.parts))
        with running_plain(self.target, model, self.dtype):
            for part, seed in zip(self.parts, seeds, strict=True):
                torch.manual_seed(seed)
                args, kwargs = part.arguments()
                output = model(*args, **kwargs)
                by_part.append(_kept(output))
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

    def run_pipe(self, pipe: nn.Module, by_part: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        """Outputs by name; unless gradients are off, the pipe's are accumulated by backward().

        `by_part` are the outputs that `run_plain` gave.
        """
        args, kwargs = self.whole.arguments()
        output = pipe(*args, **kwargs)
        if torch.is_grad_enabled():
            torch.autograd.backward(self._loss_of_whole(output, by_part))
        return {f"output {k}": tensor for k, tensor in enumerate(_kept(output))}

    def step(self, pipe: Pipeline) -> list[list[Tensor]]:
        """One training step by the schedule table; each micro-batch's outputs."""
        by_first_row: dict[int, list[Tensor]] = {}

        def loss(output: Any, target: tuple[Any, Tensor]) -> Tensor:
            wanted, rows = target
            by_first_row[int(rows[0])] = _kept(output)
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

    def means(
        self, model: nn.Module, by_part: Sequence[Sequence[Tensor]]
    ) -> dict[str, tuple[float, float]]:
        """The plain model's loss of the batch, and its micro-batches' as `step` adds them up.

        `by_part` are the outputs that `run_plain` gave. They are alike if the loss is a mean over
        rows. Without the target's loss there may be numbers that the model itself makes of all
        rows.
        """
        args, kwargs = self.whole.arguments()
        with running_plain(self.target, model, self.dtype):
            output = model(*args, **kwargs)
            structure, _ = describe(output)
            of_batch = self._numbers(output, self.whole.wanted)
            of_parts = [
                self._numbers(rebuild(structure, tensors), part.wanted)
                for tensors, part in zip(by_part, self.parts, strict=True)
            ]
        shares = [self._share(part) for part in self.parts]
        return {
            name: (float(number), float(_mean([of_part[name] for of_part in of_parts], shares)))
            for name, number in of_batch.items()
        }

    def _numbers(self, output: Any, wanted: Any) -> dict[str, Tensor]:
        if self.target.loss is not None:
            return {"the loss": self.loss(output, wanted)}
        made = zip(self._batch_dims(training=False), describe(output)[1], strict=True)
        return {
            f"output {k}": tensor
            for k, (dim, tensor) in enumerate(made)
            if dim is None and tensor.dim() == 0 and tensor.is_floating_point()
        }

    def _loss_of_whole(self, output: Any, by_part: Sequence[Sequence[Tensor]]) -> Tensor:
        """The micro-batches' losses, weighted: each has its part of what grows with the batch.

        The rest, by now the micro-batches' weighted mean, goes whole to each.
        """
        structure, tensors = describe(output)
        divided = [
            [tensor] * len(parts)
            if dim is None
            else torch.split(tensor, [part.size(dim) for part in parts], dim)
            for tensor, dim, *parts in zip(
                tensors, self._batch_dims(training=True), *by_part, strict=True
            )
        ]
        losses = [
            self.loss(rebuild(structure, tensors_of_part), part.wanted) * self._share(part)
            for part, *tensors_of_part in zip(self.parts, *divided, strict=True)
        ]
        return torch.stack(losses).sum()

    def _share(self, part: _MicroBatch) -> float:
        return part.rows / self.whole.rows

    def _batch_dims(self, training: bool) -> list[int | None]:
        """Of each output tensor, the dimension that grows with the batch."""
        structure = in_mode(self.manifest.output_structure, training)
        return [merged_dim(self.manifest.outputs[place].spec) for place in places(structure)]


def case_of(
    target: Target,
    plain: nn.Module,
    manifest: Manifest,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    """The case of `rows` rows of the target's inputs in `dtype`, on `device`, as is `plain`.

    Raises InputError if they are too few, or not the inputs that the package was made for, and
    TargetError if the target makes another number of rows.
    """
    m = manifest.microbatches
    if rows < m:
        raise InputError(
            f"a batch of {rows} can't be divided into the {m} micro-batches of this package: "
            f"verify with --batch {m} or more"
        )
    made = target.inputs(rows, plain)
    # In the order of the signature, in which the manifest lists the inputs.
    kwargs = {name: made.kwargs[name] for name in manifest.signature if name in made.kwargs}
    structure, tensors = describe(((made.args, {**kwargs, **made.kwargs}), target.targets(rows)))
    tensors = [in_precision(tensor, dtype).to(device) for tensor in tensors]
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
    return Case(target, manifest, dtype, microbatch(tensors, rows), parts)


@contextmanager
def running_plain(target: Target, model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The block runs the plain model alone: what it raises is told as TargetError."""
    what = f"forward of {type(model).__name__} in {str(dtype).removeprefix('torch.')}, or the loss,"
    try:
        with target.running(what, alone=True), no_checkpoints():
            yield
    except TargetError as error:
        if dtype != torch.float64 or not is_of_dtypes(error):
            raise
        hint = "Where it runs in float32 alone: verify with --dtype float32"
        raise TargetError(f"{error}\n{hint}") from error.__cause__


def is_of_dtypes(error: FxpipeError) -> bool:
    """Whether what torch or the model raised, which is its cause, speaks of dtypes.

    Of a tensor that was written in place torch names the dtype by the way.
    """
    text = str(error.__cause__)
    return _OF_DTYPES.search(text) is not None and "modified by an inplace operation" not in text


def _kept(output: Any) -> list[Tensor]:
    """The output's tensors as they are now: one may be a buffer, which the model goes on to write.

    Copies have no graph.
    """
    return [tensor.detach().clone() for tensor in describe(output)[1]]


def _mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    if not differentiable(tensors[0]):
        return tensors[-1]
    # In the order in which the pipeline adds: what a model makes in float32 is rounded alike.
    total = tensors[0] * shares[0]
    for tensor, share in zip(tensors[1:], shares[1:], strict=True):
        total = total + tensor * share
    return total
