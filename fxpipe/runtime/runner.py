"""A training step by the user's own closure, micro-batch by micro-batch, pipelined where it calls.

After Pfeife (Jhoo et al., ICML 2025, listing 1). The closure prepares a micro-batch, calls the
pipeline, computes a loss and calls `backward`. It pauses where it calls the pipeline, so that the
next micro-batch is prepared while the stages work, and goes on once its output has come. The
gradients that its `backward` gives the output go back by the schedule table.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime import stream
from fxpipe.runtime.closure import Closure, abandoning, running
from fxpipe.runtime.end import End
from fxpipe.runtime.microbatch import map_nested, parts_of
from fxpipe.runtime.pipeline import Visit
from fxpipe.runtime.portal import CALLER, Wire
from fxpipe.runtime.random import RandomStream, borrowed, microbatch_seeds
from fxpipe.runtime.step import Step
from fxpipe.runtime.virtual import VirtualDevice
from fxpipe.schedule import Action, Kind, clock_order


class Runner:
    """Runs closures that call a pipeline, or a module compiled with `backend="fxpipe"`, once.

    runner = fxpipe.Runner(microbatches=4)

    def closure(images, labels):
        loss = criterion(head(pipe(encode(images))), labels)
        (loss * runner.share).backward()
        return loss.detach()

    losses = runner.step(closure, images, labels)
    """

    def __init__(self, microbatches: int) -> None:
        if microbatches < 1:
            raise InputError(f"{microbatches} micro-batches: a step needs at least one")
        self._m = microbatches
        self._share = 1.0

    @property
    def share(self) -> float:
        """Within a closure, its micro-batch's share of the batch's rows.

        Gradients add up over the micro-batches: those of a loss that is a mean over rows, times
        this, are those of the mean over the batch.
        """
        return self._share

    def step(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `closure` with each micro-batch of the arguments; returns its results in order.

        The batch is dimension 0 of the first tensor. Tensors and lists of as many rows are cut,
        nested in tuples, lists and dicts too; all else is given whole. No two closures run at one
        time, and in what order their parts run is the same in every run: what comes before the
        call of the pipeline, and what comes after, micro-batch 0 first. Micro-batch i draws the
        random numbers that it would after `torch.manual_seed` of a seed of its own.

        Gradients are whole when this returns: those of what comes before the pipeline are computed
        once the pipeline's are there, after the closure has ended. What a closure raises is raised
        here, after all have ended; gradients may then hold a part of the step's. Raises InputError.
        """
        if running() is not None:
            raise InputError("a closure can't run a step: call the pipeline in it")
        pieces = cut((args, kwargs), self._m)
        turns = [
            _Turn(partial(closure, *piece, **named), seed, share)
            for ((piece, named), share), seed in zip(
                pieces, microbatch_seeds(len(pieces)), strict=True
            )
        ]
        with abandoning([turn.closure for turn in turns]):
            visit = self._prepare(turns[0])
            _Conductor(self, visit, turns).run()
        return [turn.closure.result for turn in turns]

    def _prepare(self, turn: "_Turn") -> Visit:
        """Run a closure to its call of the pipeline."""
        with self._running(turn):
            turn.closure.resume()
        if turn.closure.done:
            raise InputError(
                "the closure called no pipeline: it must call one, or a module that was compiled "
                'with torch.compile(module, backend="fxpipe", ...)'
            )
        visit: Visit = turn.closure.call
        if any(isinstance(device, VirtualDevice) for device in visit.pipe.devices):
            raise InputError(
                "a Runner's closures compute on the caller's stream, which no virtual device's "
                "stages follow: load the package with other devices, or call step()"
            )
        if visit.pipe.manifest.microbatches != self._m:
            raise InputError(
                f"the pipeline of {visit.pipe.manifest.model} was compiled for "
                f"{visit.pipe.manifest.microbatches} micro-batches, the runner cuts {self._m}: "
                "give both the same number"
            )
        return visit

    def _finish(self, turn: "_Turn", output: Any) -> None:
        """Run a closure from its call of the pipeline to its end."""
        with self._running(turn):
            turn.closure.resume(output)
        if not turn.closure.done:
            raise InputError("the closure called a pipeline twice: a step has one in it")

    @contextmanager
    def _running(self, turn: "_Turn") -> Iterator[None]:
        self._share = turn.share
        try:
            with borrowed(turn.random) as numbers:
                yield
            turn.random = numbers.end
        finally:
            self._share = 1.0


class _Turn:
    """A micro-batch's closure, and where its random numbers stand."""

    def __init__(self, function: Callable[[], Any], seed: int, share: float) -> None:
        self.closure = Closure(function)
        self.random = RandomStream(seed)
        self.share = share


class _Part(Enum):
    PREPARE = auto()
    FINISH = auto()
    UPSTREAM = auto()


class _Conductor:
    """Runs the closures on the caller's thread while the lanes run the stages."""

    def __init__(self, runner: Runner, first: Visit, turns: Sequence[_Turn]) -> None:
        self._runner = runner
        self._first = first
        self._turns = turns
        pipe = first.pipe
        self._call = pipe._new_call(len(turns))
        self._end = End(self._call, pipe._outputs, pipe._structure())
        self._visits: dict[int, Visit] = {0: first}
        self._streams = [stream.current_stream(device) for device in dict.fromkeys(pipe.devices)]

    def run(self) -> None:
        """Run all that is left of the step."""
        pipe, ambient = self._first.pipe, self._first.ambient
        table = pipe._schedule.first(self._call.m)
        step = Step(self._call, lambda i: None, table.split)
        order = clock_order(table)
        if not ambient.grad:
            order = [action for action in order if action.kind is Kind.FORWARD]
        rows = [[action for action in row if ambient.grad or action in order] for row in table.rows]
        with ambient.entered():
            pipe._run_rows(step, self._call, rows, partial(self._conduct, order))

    def _conduct(self, order: Sequence[Action]) -> None:
        self._enter(0)
        for part, i in _parts(order, self._call.n):
            if part is _Part.PREPARE:
                self._visits[i] = self._runner._prepare(self._turns[i])
                self._enter(i)
            elif part is _Part.FINISH:
                output, random = self._end.output(i), self._call.random(self._call.n, i)
                assert random is not None
                self._turns[i].random = random
                self._runner._finish(self._turns[i], (output, self._streams))
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
            with borrowed(self._turns[i].random):
                torch.autograd.backward([t for t, _ in found], [g for _, g in found])
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise InputError(
                "the closure's loss also reads, past the pipeline, what the pipeline's input was "
                "made from, and its backward has freed that: call loss.backward(retain_graph=True)"
            ) from error


def _parts(order: Sequence[Action], n: int) -> Iterator[tuple[_Part, int]]:
    """What the conductor does in which order; micro-batch 0 is prepared already.

    Each other is prepared while stage 0 runs the one before it.
    """
    firsts = [a.microbatch for a in order if a.stage == 0 and a.kind is Kind.FORWARD]
    following = iter([i for i in firsts if i != 0])
    for action in order:
        i = action.microbatch
        forward = action.kind is Kind.FORWARD
        if action.stage == 0 and forward:
            yield from ((_Part.PREPARE, k) for k in islice(following, 1))
        if action.stage == n - 1 and forward:
            yield _Part.FINISH, i
        if action.stage == 0 and action.kind.sends_back:
            yield _Part.UPSTREAM, i


def cut(batch: Any, m: int) -> list[tuple[Any, float]]:
    """The batch's micro-batches, each with its share of the rows. Raises InputError.

    The batch is dimension 0 of the first tensor; tensors and lists of as many rows are cut, into m
    or, if there are fewer rows, one by one.
    """
    first = next(_tensors(batch), None)
    if first is None:
        raise InputError("a step takes a batch: give at least one tensor with rows")
    n = len(first)
    if n == 0:
        raise InputError("a batch of 0 rows can't be cut into micro-batches: give at least one row")
    rows = parts_of(n, min(n, m))
    ends = list(accumulate(rows))
    return [
        (_piece(batch, end - size, end, n), size / n) for end, size in zip(ends, rows, strict=True)
    ]


def _tensors(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        if node.dim():
            yield node
    elif isinstance(node, tuple | list | dict):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _tensors(child)


def _piece(node: Any, start: int, end: int, batch: int) -> Any:
    if isinstance(node, Tensor):
        return node[start:end] if node.dim() and len(node) == batch else node
    if isinstance(node, list) and len(node) == batch and next(_tensors(node), None) is None:
        return node[start:end]
    return map_nested(lambda child: _piece(child, start, end, batch), node)
