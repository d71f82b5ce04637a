"""How a call begins on all ranks: each binds its inputs, and all agree on what they were given."""

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.runtime import microbatch
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.end import LossFn
from fxpipe.runtime.fit import sizes_of
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.meeting import Given, Word, Words, agreed
from fxpipe.runtime.random import microbatch_seeds
from fxpipe.runtime.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Meeting:
    """What all ranks know of a call: each replica's inputs, and what else it may depend on.

    `given` are those of this one.
    """

    replicas: Sequence[Given]
    given: Given
    kind: tuple[object, ...]

    @property
    def batch(self) -> int:
        """The rows of all replicas."""
        return sum(sum(given.rows) for given in self.replicas)

    def seeds(self, replica: int) -> list[int]:
        """Those of a replica's micro-batches, after those of the replicas before it."""
        ends = list(accumulate(len(given.rows) for given in self.replicas))
        own = len(self.replicas[replica].rows)
        return microbatch_seeds(ends[-1])[ends[replica] - own : ends[replica]]


class Entry:
    """Where the calls of one rank's part, `module`, begin."""

    def __init__(self, manifest: Manifest, ranks: Ranks) -> None:
        self._manifest = manifest
        self._ranks = ranks
        self._words = Words(ranks)

    def meet(
        self,
        what: str,
        module: nn.Module,
        read: Set[int],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *kind: object,
    ) -> tuple[list[Tensor | None], Meeting]:
        """This rank's inputs, of which its stages `read` some, and what all agree on.

        `kind` is what else dtypes and gradients of messages may depend on. Raises InputError.
        """
        inputs: list[Tensor | None] = []
        given, problem = None, None
        with self._ranks.telling():
            try:
                microbatch.refuse_other_mode(self._manifest, module.training)
                inputs, given = self._given(args, kwargs, read)
            except InputError as error:
                problem = str(error)
            ambient = Ambient.capture()
            parameters = tuple((p.dtype, p.requires_grad) for p in module.parameters())
            own = (ambient.autocast, _digest(parameters), *kind)
            words = self._words.gather(Word(what, module.training, given, problem, own))
        replicas = agreed(words, self._ranks.size)
        found = replicas[self._ranks.replica]
        # Sizes are no part of it: the shapes are the plan's.
        alike = (what, module.training, len(found.rows), found.dtypes, found.gradients)
        return inputs, Meeting(replicas, found, (*alike, *(word.kind for word in words)))

    def _given(
        self, args: Sequence[object], kwargs: Mapping[str, object], read: Set[int]
    ) -> tuple[list[Tensor | None], Given]:
        inputs = microbatch.bind_some(self._manifest, args, kwargs, read)
        manifest, tensors = microbatch.present(self._manifest, inputs)
        rows = microbatch.rows_of(manifest, tensors, manifest.microbatches)
        specs = self._manifest.inputs
        batched = [[spec.batched for spec in each] for each in (manifest.inputs, specs)]
        tells = any(batched[0]) or not any(batched[1])
        return inputs, Given(
            tuple(rows) if tells else (),
            tuple(sizes_of(manifest, tensors).items()),
            tuple(None if tensor is None else tensor.dtype for tensor in inputs),
            tuple(None if tensor is None else tensor.requires_grad for tensor in inputs),
        )


def place_of(loss_fn: LossFn) -> str:
    """Where the code of a loss stands: another one may give other outputs a gradient."""
    code = getattr(loss_fn, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else type(loss_fn).__qualname__


@lru_cache(maxsize=8)
def _digest(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
