"""The micro-batch whose costs are taken for those of each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.ir import Capture
from fxpipe.runtime.fit import unmet
from fxpipe.runtime.microbatch import parts_of
from fxpipe.turned import turned


def check_rows(rows: int, n_microbatches: int) -> None:
    """Raise InputError if there are more micro-batches than rows."""
    if rows < n_microbatches:
        raise InputError(
            f"a batch of {rows} can't be cut into {n_microbatches} micro-batches: "
            f"use at most {rows} or a larger batch"
        )


def check_sizes(capture: Capture, n_microbatches: int) -> None:
    """Raise InputError if the graph does not hold for as few rows as a micro-batch has."""
    rows = parts_of(capture.batch, n_microbatches)
    broken = unmet(capture.conditions, capture.sizes, rows)
    if broken is not None:
        condition, known = broken
        raise InputError(
            f"{capture.model_name}'s forward goes by how many rows it is given: it was captured "
            f"with {capture.batch}, where {condition}, and a micro-batch has {known['batch']}. "
            "Write it so that rows do not matter, or use fewer micro-batches or a larger batch"
        )


def fitting(capture: Capture, counts: Sequence[int]) -> tuple[int, ...]:
    """Those `counts` of micro-batches that the graph holds for; the first, if for none."""
    fit = (
        count
        for count in counts
        if count <= capture.batch
        and unmet(capture.conditions, capture.sizes, parts_of(capture.batch, count)) is None
    )
    return tuple(fit) or tuple(counts[:1])


def microbatch(
    capture: Capture, inputs: Sequence[Tensor], n_microbatches: int, i: int
) -> list[Tensor]:
    """Micro-batch i of `inputs`: the first is the largest, the last the smallest."""
    return [
        (tensor.tensor_split(n_microbatches)[i] if given.batched else tensor).detach()
        for tensor, given in zip(inputs, capture.inputs, strict=True)
    ]


@contextmanager
def first_microbatch(
    capture: Capture, inputs: Sequence[Tensor], n_microbatches: int
) -> Iterator[list[Tensor]]:
    """The largest micro-batch of `inputs`. A model that fails on it, inside, is an InputError.

    So are more micro-batches than rows.
    """
    batched = [given.batched for given in capture.inputs]
    rows = len(inputs[batched.index(True)])
    check_rows(rows, n_microbatches)
    try:
        yield microbatch(capture, inputs, n_microbatches, 0)
    except (RuntimeError, ValueError, IndexError) as error:
        way_out = _way_out(capture, inputs, rows, f"{type(error).__name__}: {error}")
        raise InputError(
            f"{capture.model_name} fails on a micro-batch of {rows // n_microbatches} rows, though "
            f"not on the whole batch of {rows}{way_out}"
        ) from error


def _way_out(capture: Capture, inputs: Sequence[Tensor], rows: int, error: str) -> str:
    """The `error`, and what to do: other numbers help no input that has the batch elsewhere."""
    whole = {
        given.name: tensor.shape
        for given, tensor in zip(capture.inputs, inputs, strict=True)
        if not given.batched
    }
    hint = [f"{', '.join(whole)}: given whole to each micro-batch"] if whole else []
    other = "use fewer micro-batches or a larger batch"
    elsewhere = turned(whole, rows)
    if elsewhere:
        return "\n".join(["", error, *hint, *elsewhere, f"Else {other}"])
    return "\n".join([f": {other}", error, *hint])
