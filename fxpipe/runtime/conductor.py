"""Closures on the caller's thread while a pipeline's lanes run its stages: what runs in what order.

A closure's part before its call of the pipeline makes the stages' inputs; the part after it takes
the output and gives its gradients; at last the gradients of the inputs go back to what they were
made from. All follow the order in which the table's actions run clock cycle by clock cycle.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import InputError
from fxpipe.runtime import stream
from fxpipe.runtime.ambient import without_autocast
from fxpipe.runtime.closure import Closure
from fxpipe.runtime.end import End
from fxpipe.runtime.engine import Visit
from fxpipe.runtime.portal import CALLER, Wire
from fxpipe.runtime.random import RandomStream, borrowed
from fxpipe.schedule import Action, Kind, clock_order


class Turn:
    """Micro-batch `i`'s closure, and where its random numbers stand; `share` is of the rows."""

    def __init__(
        self,
        i: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        seed: int,
        share: float,
    ) -> None:
        self.closure = Closure(partial(function, *args, **kwargs))
        self.random = RandomStream(seed)
        self.share = share
        self._i = i
        self._file = getattr(getattr(function, "__code__", None), "co_filename", None)

    def place(self, error: BaseException) -> str:
        """Where in the closure's file it was raised."""
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == self._file]
        at = f", {Path(self._file).name}, line {lines[-1]}" if self._file and lines else ""
        return f"in the closure of micro-batch {self._i}{at}"


class Conductor:
    """Runs the closures of `turns`, of which the first stands at its call of the pipeline.

    `prepare` runs one until its call of the pipeline, `finish` from there to its end.
    """

    def __init__(
        self,
        first: Visit,
        turns: Sequence[Turn],
        prepare: Callable[[Turn], Visit],
        finish: Callable[[Turn, Any], None],
    ) -> None:
        self._first = first
        self._turns = turns
        self._prepare = prepare
        self._finish = finish
        pipe = first.pipe
        self._call = pipe._new_visits(first, len(turns))
        self._end = End(self._call, pipe._outputs, pipe._structure())
        self._visits: dict[int, Visit] = {0: first}
        self._streams = [stream.current_stream(device) for device in dict.fromkeys(pipe.devices)]

    def run(self) -> None:
        """Run all that is left of the step."""
        pipe, ambient = self._first.pipe, self._first.ambient
        table = pipe._schedule.first(self._call.m)
        if not ambient.grad:
            table = table.forwards()
        with ambient.entered():
            pipe._run_visits(self._call, table, partial(self._conduct, clock_order(table)))

    def _conduct(self, order: Sequence[Action]) -> None:
        self._enter(0)
        for part, i in parts_in(order, self._call.n):
            if part is Part.PREPARE:
                self._visits[i] = self._prepare(self._turns[i])
                self._enter(i)
            elif part is Part.FINISH:
                output, random = self._end.output(i), self._call.random(self._call.n, i)
                assert random is not None
                self._turns[i].random = random
                self._finish(self._turns[i], (output, self._streams))
                del output
                self._end.send_gradients(i)
            else:
                self._upstream(i)

    def _enter(self, i: int) -> None:
        visit = self._visits[i]
        if visit.pipe is not self._first.pipe:
            raise InputError("the closures called different pipelines: a step has one in it")
        self._call.enter(i, visit.piece, self._turns[i].random)

    def _upstream(self, i: int) -> None:
        """Hand the gradients of the pipeline's inputs to what the closure made them from."""
        visit = self._visits.pop(i)
        found = [
            (tensor, gradient)
            for value, tensor in visit.piece.items()
            if (gradient := self._call.gradient(Wire(CALLER, value), i)) is not None
        ]
        if not found:
            return
        try:
            with borrowed(self._turns[i].random), without_autocast():
                torch.autograd.backward([t for t, _ in found], [g for _, g in found])
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise InputError(
                "the closure's loss also reads, past the pipeline, what the pipeline's input was "
                "made from, and its backward has freed that: call loss.backward(retain_graph=True)"
            ) from error


class Part(Enum):
    """Of a closure; the last is the way back, once it has ended."""

    PREPARE = auto()
    FINISH = auto()
    UPSTREAM = auto()


def parts_in(order: Sequence[Action], n: int) -> Iterator[tuple[Part, int]]:
    """What the conductor does in which order; micro-batch 0 is prepared already.

    Each other is prepared while stage 0 runs the one before it.
    """
    firsts = [a.microbatch for a in order if a.stage == 0 and a.kind is Kind.FORWARD]
    following = iter([i for i in firsts if i != 0])
    for action in order:
        i = action.microbatch
        forward = action.kind is Kind.FORWARD
        if action.stage == 0 and forward:
            yield from ((Part.PREPARE, k) for k in islice(following, 1))
        if action.stage == n - 1 and forward:
            yield Part.FINISH, i
        if action.stage == 0 and action.kind.sends_back:
            yield Part.UPSTREAM, i
