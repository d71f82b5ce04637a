"""How a call begins on all ranks: each binds its inputs, and all agree on what they were given."""

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.runtime import microbatch
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.distributed.meeting import Given, Telling, Word, Words, agreed
from fxpipe.runtime.distributed.progress import OTHERS
from fxpipe.runtime.distributed.ranks import MistakenError, Ranks
from fxpipe.runtime.distributed.shared_weights import first_names, held_elsewhere
from fxpipe.runtime.end import LossFn
from fxpipe.runtime.fit import sizes_of
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.random import microbatch_seeds

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Meeting:
    """What all ranks know of a call: each replica's inputs, and what else it may depend on.

    `given` are those of this one. With `loaded` weights were loaded on a rank before it. With
    `telling` it is what all knew of the last such call.
    """

    replicas: Sequence[Given]
    given: Given
    kind: tuple[object, ...]
    loaded: bool
    telling: Telling | None = None

    def confirm(self, check: Callable[[], None]) -> None:
        """Return once it is known to be so; `check` may raise meanwhile. Raises MistakenError."""
        if self.telling is not None:
            self.telling.confirm(check)

    @property
    def awaited(self) -> str | None:
        """What `confirm` waits for, if it does."""
        return OTHERS if self.telling is not None and self.telling.confirming else None

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
        self._first = first_names(manifest)
        self._held_elsewhere = held_elsewhere(manifest, ranks)
        self._words = Words(ranks)

    def meet(
        self,
        what: str,
        module: nn.Module,
        read: Set[int],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *kind: object,
        early: bool,
        refuse: Callable[[], None],
        loaded: bool,
    ) -> tuple[list[Tensor | None], Meeting]:
        """This rank's inputs, of which its stages `read` some, and what all agree on.

        `kind` is what else messages may depend on, but for their shapes. With `early` it may be
        what all agreed on when this rank was last called so. `loaded` says whether this rank was
        given weights since the last call. Raises InputError, alike on all if `refuse` does on one.
        """
        inputs: list[Tensor | None] = []
        given, problem = None, None
        with self._ranks.telling():
            try:
                refuse()
                microbatch.refuse_other_mode(self._manifest, module.training)
                inputs, given = self._given(args, kwargs, read)
            except InputError as error:
                problem = str(error)
            autocast = Ambient.capture().autocast_text
            parameters = tuple((p.dtype, p.requires_grad, p.stride()) for p in module.parameters())
            own = (_digest(parameters), *map(_order, inputs), *kind)
            requires = self.trained_and_frozen(module)
            word = Word(what, module.training, autocast, given, problem, own, *requires, loaded)
            telling = self._words.begin(word)
        likely = telling.likely
        if early and likely is not None and not any(each.loaded for each in likely):
            with suppress(InputError):  # it was one then: what is it now?
                return inputs, self._met(likely, telling)
        return inputs, self._settled(telling)

    def trained_and_frozen(self, module: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """The parameters of this rank's that others hold too, by their first names."""
        requires = {
            first: parameter.requires_grad
            for name, parameter in module.named_parameters()
            if (first := self._first[name]) in self._held_elsewhere
        }
        trained = frozenset(name for name, required in requires.items() if required)
        return trained, frozenset(requires) - trained

    def run(self, call: Callable[[Meeting], T], meeting: Meeting) -> T:
        """What `call` gives with what all agree on, which may turn out not to be `meeting`."""
        try:
            return call(meeting)
        except MistakenError:
            assert meeting.telling is not None
            settled = self._settled(meeting.telling)
        return call(settled)

    def _settled(self, telling: Telling) -> Meeting:
        with self._ranks.telling():
            words = self._words.end(telling)
        return self._met(words)

    def _met(self, words: Sequence[Word], telling: Telling | None = None) -> Meeting:
        replicas = agreed(words, self._ranks.size)
        found, own = replicas[self._ranks.replica], words[self._ranks.world_rank]
        # Sizes are no part of it: the shapes are the plan's.
        called = (own.what, own.training, own.autocast)
        inputs = (len(found.rows), found.dtypes, found.gradients)
        kind = (*called, *inputs, *(word.kind for word in words))
        loaded = any(word.loaded for word in words)
        return Meeting(replicas, found, kind, loaded, telling)

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


def _order(tensor: Tensor | None) -> tuple[int, ...]:
    """How an input lies in memory: its dims of more than one item by their strides."""
    if tensor is None:
        return ()
    strides = tensor.stride()
    longer = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    return tuple(sorted(longer, key=lambda dim: -strides[dim]))


@lru_cache(maxsize=8)
def _digest(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
