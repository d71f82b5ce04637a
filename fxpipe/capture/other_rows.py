"""Which other number of rows than the traced one are graph and model compared on?

One more, which most models take. Some take multiples of a number alone, as of rows that are pairs,
and some no more rows than they were given. Some do something else with one more, by a comparison
that the trace made: `if len(x) % 2 == 0`. They are compared on rows of which it holds.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fxpipe.capture.calls import CallCheck
from fxpipe.capture.check import Check, Checked
from fxpipe.capture.places import user_place
from fxpipe.capture.row_numbers import broken, others, related, unbroken
from fxpipe.capture.sizes import Sizes, elsewhere, resized
from fxpipe.errors import CaptureError, InputError


@dataclass(frozen=True, slots=True)
class Compared:
    """The check on other sizes than the traced ones, and what it found.

    The model takes multiples of `step` rows alone, which divides the traced ones.
    """

    check: Check | CallCheck
    found: Checked
    step: int


def compare_elsewhere(
    check: Check | CallCheck, sizes: Sizes, inputs: Sequence[str], batched: Sequence[bool]
) -> Compared:
    """Run `check`, which has the traced inputs, on others.

    Raises CaptureError if graph and model differ there, or the model takes no other number of rows,
    and InputError if it fails on the traced inputs as well.
    """
    batch = sizes.values["batch"]
    breaks = broken(sizes, batch + 1)
    alone = [k for k, is_batched in enumerate(batched) if not is_batched and check.inputs[k].dim()]
    names = {str(sizes.shapes[k][0]) for k in alone} & sizes.values.keys()
    if any(re.search(rf"\b{name}\b", text) for text in breaks for name in names):
        raise CaptureError("the rows of inputs that don't have the batch's can't be left open")
    whole = {inputs[k]: len(check.inputs[k]) for k in alone if len(check.inputs[k]) > 1}
    rows, step = batch + 1, 1
    try:
        compared = _compare(check, sizes, rows, step)
        if compared.found.agrees_in_train or not breaks:
            return compared
    except (CaptureError, InputError) as error:
        # With no comparison broken, other rows are not why the graph is wrong, or no size is near.
        known = isinstance(error, CaptureError) and not breaks
        refusal = None if known else _refusal(check, sizes, rows)
        if refusal is None and not breaks:
            raise
        if refusal is not None:
            tried = others(batch, whole.values())
            taken = ((n, of) for n, of in tried if _refusal(check, sizes, n) is None)
            rows, step = next(taken, (batch, 1))
            if rows == batch:
                check.plain()
                model, first = type(check.flat.model).__name__, inputs[list(batched).index(True)]
                raise CaptureError(_one_number(model, batch, first, whole, refusal)) from refusal
            if rows < batch:
                step = _step_below(check, sizes, step, whole.values())
    if broken(sizes, rows):
        near = unbroken(sizes, step, whole.values())
        rows = next((n for n in near if _refusal(check, sizes, n) is None), rows)
    return _compare(check, sizes, rows, step)


def _compare(check: Check | CallCheck, sizes: Sizes, rows: int, step: int) -> Compared:
    there = replace(check, inputs=resized(check.inputs, sizes, elsewhere(sizes, rows)))
    return Compared(there, there.run(), step)


def _refusal(check: Check | CallCheck, sizes: Sizes, rows: int) -> InputError | None:
    """Why the model by itself does not take so many rows, all other sizes as they were traced."""
    try:
        replace(check, inputs=resized(check.inputs, sizes, {**sizes.values, "batch": rows})).plain()
    except InputError as error:
        return error
    return None


def _step_below(check: Check | CallCheck, sizes: Sizes, step: int, whole: Collection[int]) -> int:
    """The step of a model that takes `step` rows fewer than the traced ones, but as many more not.

    It may be one that takes a number's divisors: then it takes fewer rows than a step as well.
    """
    batch = sizes.values["batch"]
    parts = (n for n in range(1, step) if step % n == 0 and not related(batch, n, whole))
    return next((n for n in parts if _refusal(check, sizes, n) is None), step)


def _one_number(
    model: str, batch: int, first: str, whole: Mapping[str, int], refusal: InputError
) -> str:
    error = refusal.__cause__ or refusal
    message = (
        f"{model}.forward takes {batch} rows but not {batch + 1}: it fails {user_place(error)}\n"
        f"{type(error).__name__}: {error}\n"
        "A pipeline cuts the batch into micro-batches of fewer rows. For the batch it takes "
        f"dimension 0 of {first!r}"
    )
    if not whole:
        return f"{message}: write forward so that it takes other numbers of rows."
    others = ", ".join(f"{name!r} ({n} rows)" for name, n in whole.items())
    return (
        f"{message}; {others} would go whole to each micro-batch. Give inputs that belong together "
        "as many rows, as [batch, 2, ...] in place of [2 * batch, ...], which forward can flatten."
    )
