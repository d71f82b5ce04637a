"""Which other number of rows than the traced one are graph and model compared on?

One more, which most models take. Some take multiples of a number alone, as of rows that are pairs,
and some no more rows than they were given. Some do something else with one more, by a comparison
that the trace made: `if len(x) % 2 == 0`. They are compared on rows of which it holds.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from fxpipe.capture.calls import CallCheck
from fxpipe.capture.check import Check, Checked
from fxpipe.capture.places import user_place
from fxpipe.capture.sizes import Sizes, elsewhere, resized
from fxpipe.errors import CaptureError, InputError
from fxpipe.runtime.sizes import holds

_STEPS = 8  # tried at most: each costs two forwards of the model


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
    broken = _broken(sizes, batch + 1)
    alone = [k for k, is_batched in enumerate(batched) if not is_batched and check.inputs[k].dim()]
    names = {str(sizes.shapes[k][0]) for k in alone} & sizes.values.keys()
    if any(re.search(rf"\b{name}\b", text) for text in broken for name in names):
        raise CaptureError("the rows of inputs that don't have the batch's can't be left open")
    whole = {inputs[k]: len(check.inputs[k]) for k in alone if len(check.inputs[k]) > 1}
    rows, step = batch + 1, 1
    try:
        compared = _compare(check, sizes, rows, step)
        if compared.found.agrees_in_train or not broken:
            return compared
    except (CaptureError, InputError) as error:
        # With no comparison broken, other rows are not why the graph is wrong, or no size is near.
        known = isinstance(error, CaptureError) and not broken
        refusal = None if known else _refusal(check, sizes, rows)
        if refusal is None and not broken:
            raise
        if refusal is not None:
            others = _others(batch, set(whole.values()))
            taken = ((n, of) for n, of in others if _refusal(check, sizes, n) is None)
            rows, step = next(taken, (batch, 1))
            if rows == batch:
                check.plain()
                model, first = type(check.flat.model).__name__, inputs[list(batched).index(True)]
                raise CaptureError(_one_number(model, batch, first, whole, refusal)) from refusal
            if rows < batch:
                step = _step_below(check, sizes, step, set(whole.values()))
    if _broken(sizes, rows):
        near = _unbroken(sizes, step, set(whole.values()))
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


def _others(batch: int, whole: set[int]) -> Iterator[tuple[int, int]]:
    """Other numbers of rows than one more, and the step of a model that takes none before them."""
    divisors = (n for n in range(1, batch + 1) if batch % n == 0)
    for step in islice(divisors, _STEPS):
        for rows in (batch + step, batch - step):
            if 1 < rows != batch + 1 and not _related(batch, rows, whole):
                yield rows, step


def _step_below(check: Check | CallCheck, sizes: Sizes, step: int, whole: set[int]) -> int:
    """The step of a model that takes `step` rows fewer than the traced ones, but as many more not.

    It may be one that takes a number's divisors: then it takes fewer rows than a step as well.
    """
    batch = sizes.values["batch"]
    parts = (n for n in range(1, step) if step % n == 0 and not _related(batch, n, whole))
    return next((n for n in parts if _refusal(check, sizes, n) is None), step)


def _unbroken(sizes: Sizes, step: int, whole: set[int]) -> Iterator[int]:
    """Other multiples of `step` rows that break no comparison of the trace, the nearest first."""
    batch = sizes.values["batch"]
    others = {*range(step, 2 * batch + 1, step)} - {1, batch}
    near = sorted(others, key=lambda n: (abs(n - batch), -n))
    met = (n for n in near if not (_related(batch, n, whole) or _broken(sizes, n)))
    return islice(met, _STEPS)


def _broken(sizes: Sizes, rows: int) -> list[str]:
    """The comparisons of the trace that so many rows break."""
    return [text for text in sizes.compared if not holds(text, {**sizes.values, "batch": rows})]


def _related(batch: int, rows: int, whole: set[int]) -> bool:
    """Whether both stand to the rows of an input that goes whole to each micro-batch.

    `texts.view(len(images), -1)` would take such `rows`, but of pieces of the batch it computes
    something else: they are not tried.
    """
    return all(any(n % of == 0 or of % n == 0 for of in whole) for n in (batch, rows))


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
