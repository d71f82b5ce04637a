"""A training step by the user's own closure, micro-batch by micro-batch, pipelined where it calls.

After Pfeife (Jhoo et al., ICML 2025, listing 1). The closure prepares a micro-batch, calls the
pipeline, computes a loss and calls `backward`. It pauses where it calls the pipeline, so that the
next micro-batch is prepared while the stages work, and goes on once its output has come. The
gradients that its `backward` gives the output go back by the schedule table.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime.closure import abandoning, running
from fxpipe.runtime.conductor import Conductor, Turn
from fxpipe.runtime.engine import Visit
from fxpipe.runtime.listeners import telling_all
from fxpipe.runtime.microbatch import map_nested, parts_of
from fxpipe.runtime.random import borrowed, microbatch_seeds
from fxpipe.runtime.virtual import VirtualDevice


class Runner:
    """Runs closures that call a pipeline, or a module compiled with `backend="fxpipe"`, once.

    runner = fxpipe.Runner(microbatches=4)

    def closure(images, labels):
        loss = criterion(head(pipe(encode(images))), labels)
        (loss * runner.share).backward()
        return loss.detach()

    losses = runner.step(closure, images, labels)

    Around a pipeline over processes, all ranks call `step` with the same closure and batch. Each
    rank runs every closure whole: what comes before the pipeline, whose results its own stages take
    from it; what comes after, for which outputs and random numbers come to all ranks; and the way
    back of what came before, for which the gradients of inputs come to all. A rank's stages take
    the outputs' gradients from its own closures. So every rank has all results, and parameters
    around the pipeline get the plain program's gradients on each, equal and counted once, if they
    and the random numbers begin equal. The ranks compare some of what they give the pipeline, and
    raise InputError if it differs.

    Around replicas of it (`load(..., dp=2)`) each has a batch of its own, which all its ranks give
    alike, and `share` is of all replicas' rows: read it once the pipeline was called. `around` are
    then the parameters around the pipeline, whose gradients are summed over the replicas as those
    in it are; what the pipeline holds itself may be among them. For other random numbers on each,
    seed each replica by itself.
    """

    def __init__(self, microbatches: int, around: Iterable[Tensor] | None = None) -> None:
        if microbatches < 1:
            raise InputError(f"{microbatches} micro-batches: a step needs at least one")
        self._m = microbatches
        self._around = None if around is None else list(around)
        self._share = 1.0
        self._share_was_read = False

    @property
    def share(self) -> float:
        """Within a closure, its micro-batch's share of the batch's rows.

        Gradients add up over the micro-batches: those of a loss that is a mean over rows, times
        this, are those of the mean over the batch.
        """
        self._share_was_read = True
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
        with telling_all():
            rows = _rows((args, kwargs))
            pieces = cut((args, kwargs), self._m)
            seeds = microbatch_seeds(len(pieces))
            turns = [
                Turn(i, closure, piece, named, seed, share)
                for i, (((piece, named), share), seed) in enumerate(zip(pieces, seeds, strict=True))
            ]
        with abandoning([turn.closure for turn in turns]):
            self._share_was_read = False
            with telling_all():
                visit = self._prepare(turns[0])
            with visit.pipe._beside_replicas(rows, self._around) as share:
                self._weigh(turns, share)
                Conductor(visit, turns, self._prepare, self._finish).run()
        return [turn.closure.result for turn in turns]

    def _weigh(self, turns: Sequence[Turn], share: float) -> None:
        """Let the micro-batches' shares be of all replicas' rows, of which the batch is `share`."""
        if share != 1 and self._share_was_read:
            raise InputError(
                "the closure read the runner's share before it called the pipeline: around "
                "replicas it is known from there on. Weigh the loss after the call"
            )
        for turn in turns:
            turn.share *= share

    def _prepare(self, turn: Turn) -> Visit:
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

    def _finish(self, turn: Turn, output: Any) -> None:
        """Run a closure from its call of the pipeline to its end."""
        with self._running(turn):
            turn.closure.resume(output)
        if not turn.closure.done:
            raise InputError("the closure called a pipeline twice: a step has one in it")

    @contextmanager
    def _running(self, turn: Turn) -> Iterator[None]:
        self._share = turn.share
        try:
            with borrowed(turn.random) as numbers:
                yield
            turn.random = numbers.end
        except BaseException as error:
            error.add_note(turn.place(error))
            raise
        finally:
            self._share = 1.0


def cut(batch: Any, m: int) -> list[tuple[Any, float]]:
    """The batch's micro-batches, each with its share of the rows. Raises InputError.

    The batch is dimension 0 of the first tensor; tensors and lists of as many rows are cut, into m
    or, if there are fewer rows, one by one.
    """
    n = _rows(batch)
    rows = parts_of(n, min(n, m))
    ends = list(accumulate(rows))
    return [
        (_piece(batch, end - size, end, n), size / n) for end, size in zip(ends, rows, strict=True)
    ]


def _rows(batch: Any) -> int:
    """Those of the first tensor. Raises InputError if there are none."""
    first = next(_tensors(batch), None)
    if first is None:
        raise InputError("a step takes a batch: give at least one tensor with rows")
    if len(first) == 0:
        raise InputError("a batch of 0 rows can't be cut into micro-batches: give at least one row")
    return len(first)


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
