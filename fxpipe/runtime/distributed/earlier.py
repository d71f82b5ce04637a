"""Gradients that earlier steps have left, where ranks add up what each finds in the next one."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def parted(gradients: Iterable[tuple[Tensor, int]]) -> Iterator[None]:
    """In the block each of the n ranks that have a gradient alike has 1 / n of it, in its memory.

    What a step finds is added to that, and the sum over the ranks has all of it: so none holds a
    second gradient. If the block fails, each has all of it again, with what was added meanwhile.
    """
    held = list(gradients)
    for gradient, n in held:
        gradient.div_(n)
    try:
        yield
    except BaseException:
        for gradient, n in held:
            gradient.mul_(n)
        raise
