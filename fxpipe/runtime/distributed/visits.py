"""A runner's closures around a pipeline over processes.

Every rank runs every closure, with its own copy of what stands around the pipeline. All copies
compute the same, so their gradients are equal without a message. Meanwhile each rank's lane runs
its row of the table, in which there are also the sends to the closures of all ranks.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.runtime import microbatch
from fxpipe.runtime.distributed.exchange import Exchange
from fxpipe.runtime.distributed.meeting import Given, Word, agreed, refuse_problems
from fxpipe.runtime.distributed.overflow import spread_overflow, watched_scalers
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.distributed.replicas import Replicas
from fxpipe.runtime.distributed.replicated import (
    ReplicatedCall,
    numbers_of,
    refuse_differing,
    sampled,
)
from fxpipe.runtime.engine import Visit
from fxpipe.runtime.fit import sizes_of
from fxpipe.runtime.mailbox import StoppedError
from fxpipe.runtime.step import Step
from fxpipe.schedule import Schedule

if TYPE_CHECKING:
    from fxpipe.runtime.distributed.engine import RankEngine


@contextmanager
def beside_replicas(
    pipe: "RankEngine", replicas: Replicas, rows: int, around: Sequence[Tensor] | None
) -> Iterator[float]:
    """Gives the share of this replica's `rows` in all replicas' rows.

    When the block ends, its gradients of `around`, which all ranks of a replica have alike, are
    summed over the replicas. Raises InputError, alike on all ranks, if that is None, or if
    `refuse_hooks` does on one.
    """
    ranks = pipe._ranks
    if around is None:
        raise InputError(
            f"closures around {ranks.dp} replicas of a pipeline: name the parameters around it, "
            "whose gradients are summed over them too, as Runner(m, around=head.parameters()); "
            "() if there are none"
        )
    problem = None
    with ranks.telling():
        try:
            pipe._weights.refuse_hooks(pipe)
        except InputError as error:
            problem = str(error)
        found = ranks.gather_world((rows, problem, pipe._may_differ))
    refuse_problems([each for _, each, _ in found])
    _equalize_if(any(differs for *_, differs in found), pipe)
    with replicas.summed(around):
        yield rows / sum(n for n, *_ in found[:: ranks.size])  # each replica's first rank's


def begin(pipe: "RankEngine", first: Visit, m: int) -> ReplicatedCall:
    """The call that m closures enter, once all ranks have come to it with the same `first`.

    Raises InputError, alike on all ranks.
    """
    ranks, grad = pipe._ranks, first.ambient.grad
    inputs = list(first.piece.values())
    given = Given(
        tuple(microbatch.rows_of(pipe.manifest, inputs, 1)),
        tuple(sizes_of(pipe.manifest, inputs).items()),
        tuple(tensor.dtype for tensor in inputs),
        tuple(tensor.requires_grad for tensor in inputs),
    )
    what = f"with {m} closures" if grad else f"with {m} closures without gradients"
    with ranks.telling():
        autocast, requires = first.ambient.autocast_text, pipe._entry.trained_and_frozen(pipe)
        word = Word(what, pipe.training, autocast, given, None, None, *requires, pipe._may_differ)
        found = ranks.gather((word, numbers_of(sampled(0, first.piece))))
    agreed([word for word, _ in found], ranks.size)
    refuse_differing([samples for _, samples in found])
    _equalize_if(any(word.loaded for word, _ in found), pipe)
    rows = pipe._plan.rows(m, pipe.training, grad, everywhere=True)
    wires = pipe._plan.wires(pipe.training)
    elsewhere = [j for j, home in enumerate(pipe._homes[:-1]) if home != ranks.rank]
    links = pipe._new_links(m)
    return ReplicatedCall(pipe._everywhere, wires, links, m, elsewhere, rows[ranks.rank])


def _equalize_if(loaded: bool, pipe: "RankEngine") -> None:
    """Give what several ranks hold one value, if weights were `loaded` on a rank."""
    if loaded:
        with pipe._ranks.telling():
            pipe.equalize()


def run(
    pipe: "RankEngine", call: ReplicatedCall, table: Schedule, conduct: Callable[[], None]
) -> None:
    """Run this rank's row while `conduct` runs the closures."""
    ranks, grad = pipe._ranks, torch.is_grad_enabled()
    step = Step(call, lambda i: None, table.split)
    rows = pipe._plan.rows(call.m, pipe.training, grad, everywhere=True)

    def meanwhile(done: threading.Event) -> None:
        with _watched(ranks, call.stop):
            conduct()
        ranks.wait(done)

    with ranks.telling(), watched_scalers() as scalers:
        with pipe._collected() if grad else nullcontext():
            # A closure's micro-batch may have any sizes: each message tells its own.
            exchange = Exchange(ranks, pipe._transport, call, rows, None, lambda message: None)
            pipe._exchange(step, exchange, call, meanwhile)
        found = ranks.gather((numbers_of(call.samples), bool(scalers)))
        if all(scaled for _, scaled in found):
            spread_overflow([*pipe.parameters()], ranks)
    refuse_differing([samples for samples, _ in found])
    if len({scaled for _, scaled in found}) > 1:
        raise InputError("closures scale the loss on some ranks alone: use a GradScaler on all")


@contextmanager
def _watched(ranks: Ranks, stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` if a rank fails while the block runs; then raises StageError at its end.

    The block may stand in a closure, or wait for this rank's lane.
    """
    done = threading.Event()
    heard: list[BaseException] = []

    def watch() -> None:
        try:
            ranks.wait(done)
        except BaseException as error:
            heard.append(error)
            stop()

    thread = threading.Thread(target=watch, name="fxpipe watch", daemon=True)
    thread.start()
    try:
        yield
    except StoppedError:
        if not heard:
            raise
    finally:
        done.set()
        thread.join()
    if heard:
        raise heard[0]
