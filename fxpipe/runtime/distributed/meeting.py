"""What the ranks tell each other as a call begins: each gives what it was called with.

A rank that was called like this before may take it that all were, and begin, as long as nothing
that it does is seen: before that it waits until all have told.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxpipe.errors import InputError
from fxpipe.runtime.distributed.patience import wait_checking
from fxpipe.runtime.distributed.ranks import MistakenError, Ranks

_NEW = 0  # the number of what was not said before
_KEPT = 32  # words of so many calls


@dataclass(frozen=True, slots=True)
class Given:
    """The inputs of a call as they are on a rank: None for each that it was not given.

    `rows` are those of each micro-batch, empty if it was given none that tells.
    """

    rows: tuple[int, ...]
    sizes: tuple[tuple[str, int], ...]
    dtypes: tuple[torch.dtype | None, ...]
    gradients: tuple[bool | None, ...]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {n}" for name, n in self.sizes)
        dtypes = [str(dtype) for dtype in self.dtypes if dtype is not None]
        wanting = sum(gradient is True for gradient in self.gradients)
        return f"{sizes}, {', '.join(dtypes)}, {wanting} of them with a gradient"

    def joined(self, other: "Given") -> "Given | None":
        """What both have; None if they differ in what each has."""
        sizes, others = dict(self.sizes), dict(other.sizes)
        fields = [
            *zip(self.dtypes, other.dtypes, strict=True),
            *zip(self.gradients, other.gradients, strict=True),
            *((sizes[name], others[name]) for name in sizes.keys() & others.keys()),
            (self.rows or None, other.rows or None),
        ]
        if any(None not in pair and pair[0] != pair[1] for pair in fields):
            return None
        return Given(
            self.rows or other.rows,
            tuple((sizes | others).items()),
            tuple(b if a is None else a for a, b in zip(self.dtypes, other.dtypes, strict=True)),
            tuple(
                b if a is None else a for a, b in zip(self.gradients, other.gradients, strict=True)
            ),
        )


@dataclass(frozen=True, slots=True)
class Word:
    """A rank's call: by `what` it was made, its mode, its inputs, or why it can't go on.

    `kind` is all else that dtypes and gradients of what ranks send each other may depend on. Of the
    parameters that other ranks hold too, it has `trained` and `frozen` ones, by their first names;
    they may differ from the others' where it has `loaded` weights since the last call.
    """

    what: str
    training: bool
    autocast: str
    given: Given | None
    problem: str | None
    kind: object
    trained: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    loaded: bool = False


class Telling:
    """A rank's word on its way to the others; `likely` is what all said when it last said it."""

    def __init__(self, ranks: Ranks, own: Word, number: int, likely: list[Word] | None) -> None:
        self.own = own
        self.likely = likely
        self.confirming = False
        self._number = number
        self._done, self._numbers = ranks.begin_numbers([number])

    def wait(self, wait: Callable[[threading.Event], None]) -> list[Word] | None:
        """What is likely, if it is so; None if a rank says something else."""
        wait(self._done)
        return self.likely if all(n == self._number for (n,) in self._numbers) else None

    def confirm(self, check: Callable[[], None]) -> None:
        """Return once all ranks have said what is likely, on a thread that `check` may stop.

        Raises MistakenError if one says something else.
        """
        self.confirming = True
        said = self.wait(lambda done: wait_checking([done], check))
        self.confirming = False
        if said is None:
            raise MistakenError


class Words:
    """What ranks have told each other as calls began; said again, its number is enough."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._told = 0
        self._last: dict[Word, int] = {}  # this rank's, and when it said it last
        self._known: dict[int, list[Word]] = {}

    def begin(self, own: Word) -> Telling:
        """Begin to tell this rank's."""
        number = self._last.get(own, _NEW)
        return Telling(self._ranks, own, number, self._known.get(number))

    def end(self, telling: Telling) -> list[Word]:
        """Each rank's word, in order of the ranks."""
        said = telling.wait(self._ranks.wait)
        if said is not None:
            return said
        own = telling.own
        words = self._ranks.gather_world(own)
        # All ranks count alike, and forget alike.
        self._told += 1
        self._known[self._told] = words
        self._last[own] = self._told
        self._known.pop(self._told - _KEPT, None)
        self._last = {word: at for word, at in self._last.items() if at in self._known}
        return words


def agreed(words: Sequence[Word], size: int) -> list[Given]:
    """The inputs of each replica of `size` ranks, on which those of its ranks that have some agree.

    Replicas' batches may differ in size. Raises InputError, alike on all.
    """
    refuse_problems([word.problem for word in words])
    for rank, word in enumerate(words):
        for found, first in [
            (f"was called {word.what}", words[0].what),
            (f"is in {_mode(word)} mode", f"in {_mode(words[0])} mode"),
            (f"is {word.autocast}", words[0].autocast),
        ]:
            if not found.endswith(first):
                raise InputError(f"rank {rank} {found}, rank 0 {first}: call all ranks alike")
    _refuse_frozen_in_part(words)
    replicas = [_given(words[rank : rank + size], rank) for rank in range(0, len(words), size)]
    given = replicas[0]
    for replica, other in enumerate(replicas):
        if (other.dtypes, other.gradients) != (given.dtypes, given.gradients):
            raise InputError(
                f"replica 0 was given inputs of {given}; replica {replica} of {other}: replicas' "
                "batches may differ in size alone"
            )
    return replicas


def refuse_problems(problems: Sequence[str | None]) -> None:
    """Raise InputError if a rank, in order, has one."""
    found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if found:
        raise InputError("\n".join(found))


def _given(words: Sequence[Word], first: int) -> Given:
    """The inputs of the replica whose ranks begin with `first`."""
    parts = [word.given for word in words if word.given is not None]
    found = parts[0]
    for k, part in enumerate(parts):
        joined = found if part == found else found.joined(part)
        if joined is None:
            before = next(j for j in range(k) if parts[j].joined(part) is None)
            raise InputError(
                f"rank {first + before} was given inputs of {parts[before]}; rank {first + k} of "
                f"{part}: give all ranks that get some the same"
            )
        found = joined
    if not found.rows:
        raise InputError(
            f"none of ranks {first} to {first + len(words) - 1} was given inputs: give them where "
            "the first stage is"
        )
    return found


def _refuse_frozen_in_part(words: Sequence[Word]) -> None:
    """Raise InputError if what one rank trains another has frozen: they would wait for ever."""
    frozen = frozenset[str]().union(*(word.frozen for word in words))
    for rank, word in enumerate(words):
        if differing := sorted(frozen & word.trained):
            name = differing[0]
            other = next(k for k, each in enumerate(words) if name in each.frozen)
            raise InputError(
                f"{name} is trained on rank {rank}, frozen on rank {other}, and both hold it: set "
                "requires_grad alike on all"
            )


def _mode(word: Word) -> str:
    return "training" if word.training else "eval"
