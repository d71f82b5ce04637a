"""What the ranks tell each other as a call begins: each gives what it was called with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxpipe.errors import InputError


@dataclass(frozen=True, slots=True)
class Given:
    """The inputs of a call as they are on a rank that was given them."""

    rows: tuple[int, ...]
    sizes: tuple[tuple[str, int], ...]
    dtypes: tuple[torch.dtype, ...]
    gradients: tuple[bool, ...]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {n}" for name, n in self.sizes)
        wanting = sum(self.gradients)
        return f"{sizes}, {', '.join(map(str, self.dtypes))}, {wanting} of them with a gradient"


@dataclass(frozen=True, slots=True)
class Word:
    """A rank's call: `what` it is, its mode, its inputs, if any, and why it can't go on, if so.

    `kind` is all else that dtypes and gradients of what ranks send each other may depend on.
    """

    what: str
    training: bool
    given: Given | None
    problem: str | None
    kind: object


def agreed(words: Sequence[Word], size: int) -> list[Given]:
    """The inputs of each replica of `size` ranks, on which those of its ranks that have some agree.

    Replicas' batches may differ in size. Raises InputError, alike on all.
    """
    problems = [f"rank {rank}: {w.problem}" for rank, w in enumerate(words) if w.problem]
    if problems:
        raise InputError("\n".join(problems))
    for rank, word in enumerate(words):
        for found, first in [
            (f"was called with {word.what}", f"with {words[0].what}"),
            (f"is in {_mode(word)} mode", f"in {_mode(words[0])} mode"),
        ]:
            if not found.endswith(first):
                raise InputError(f"rank {rank} {found}, rank 0 {first}: call all ranks alike")
    replicas = [_given(words[rank : rank + size], rank) for rank in range(0, len(words), size)]
    given = replicas[0]
    for replica, other in enumerate(replicas):
        if (other.dtypes, other.gradients) != (given.dtypes, given.gradients):
            raise InputError(
                f"replica 0 was given inputs of {given}; replica {replica} of {other}: replicas' "
                "batches may differ in size alone"
            )
    return replicas


def _given(words: Sequence[Word], first: int) -> Given:
    """The inputs of the replica whose ranks begin with `first`."""
    holders = [(rank, w.given) for rank, w in enumerate(words, first) if w.given is not None]
    if not holders:
        last = first + len(words) - 1
        raise InputError(
            f"none of ranks {first} to {last} was given inputs: give them where the first stage is"
        )
    (first_rank, given), *others = holders
    for rank, other in others:
        if other != given:
            raise InputError(
                f"rank {first_rank} was given inputs of {given}; rank {rank} of {other}: give all "
                "ranks that get some the same"
            )
    return given


def _mode(word: Word) -> str:
    return "training" if word.training else "eval"
