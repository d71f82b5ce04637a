"""Numbers of rows that are worth a try, by arithmetic alone."""

from collections.abc import Collection, Iterator
from itertools import islice

from fxpipe.capture.sizes import Sizes
from fxpipe.runtime.sizes import holds

_STEPS = 8  # tried at most: each costs two forwards of the model


def others(batch: int, whole: Collection[int]) -> Iterator[tuple[int, int]]:
    """Other numbers of rows than one more, and the step of a model that takes none before them."""
    divisors = (n for n in range(1, batch + 1) if batch % n == 0)
    for step in islice(divisors, _STEPS):
        for rows in (batch + step, batch - step):
            if 1 < rows != batch + 1 and not related(batch, rows, whole):
                yield rows, step


def unbroken(sizes: Sizes, step: int, whole: Collection[int]) -> Iterator[int]:
    """Other multiples of `step` rows that break no comparison of the trace, the nearest first."""
    batch = sizes.values["batch"]
    multiples = {*range(step, 2 * batch + 1, step)} - {1, batch}
    near = sorted(multiples, key=lambda n: (abs(n - batch), -n))
    met = (n for n in near if not (related(batch, n, whole) or broken(sizes, n)))
    return islice(met, _STEPS)


def broken(sizes: Sizes, rows: int) -> list[str]:
    """The comparisons of the trace that so many rows break."""
    return [text for text in sizes.compared if not holds(text, {**sizes.values, "batch": rows})]


def related(batch: int, rows: int, whole: Collection[int]) -> bool:
    """Whether both stand to the rows of an input that goes whole to each micro-batch.

    `texts.view(len(images), -1)` would take such `rows`, but of pieces of the batch it computes
    something else: they are not tried.
    """
    return all(any(n % of == 0 or of % n == 0 for of in whole) for n in (batch, rows))
