"""A rank's row of the table at work on its lane: actions, and what goes to other ranks between."""

import threading
from collections.abc import Callable
from itertools import takewhile

from fxpipe.errors import InputError
from fxpipe.runtime.call import Call
from fxpipe.runtime.distributed.entry import Meeting
from fxpipe.runtime.distributed.exchange import Exchange
from fxpipe.runtime.distributed.messages import Item, Leave, Post, Receive, Reduce, Send
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.distributed.weights import RankWeights
from fxpipe.runtime.mailbox import StoppedError
from fxpipe.runtime.step import Step
from fxpipe.schedule import Action, Kind

# Runs a job on the lane, and a second one meanwhile on the caller's thread.
Launch = Callable[[Callable[[], None], Callable[[], None]], None]


_running: set[int] = set()  # the threads that run rows


def refuse_within_row() -> None:
    """Raise InputError on a thread that runs a row: another one would wait for other ranks."""
    if threading.get_ident() in _running:
        raise InputError(
            "a loss function runs on the last stage's rank alone, and a pipeline over processes "
            "that it calls would wait for the other ranks: call that one before the step, on all "
            "ranks, and give what it returns as a part of `target`"
        )


class RankRow:
    """Runs rows of this rank, whose parameters are `weights`."""

    def __init__(self, ranks: Ranks, weights: RankWeights) -> None:
        self._ranks = ranks
        self._weights = weights

    def run(
        self,
        launch: Launch,
        step: Step,
        exchange: Exchange,
        call: Call,
        meanwhile: Callable[[threading.Event], None],
        meeting: Meeting | None,
    ) -> None:
        """Run the row whose messages are `exchange`.

        `meanwhile` runs on the caller's thread, and is given what is set once the row is done. The
        `meeting` is confirmed once the row's first forwards are done, before anybody sees of them.
        """
        done = threading.Event()
        row, progress = exchange.row, self._ranks.progress
        shards, replicas = self._weights.shards, self._weights.replicas

        def run() -> None:
            _running.add(threading.get_ident())
            n_alone = sum(1 for _ in takewhile(lambda item: _is_forward(item, call.n), row))
            try:
                for place, item in enumerate(row):
                    progress.item = place
                    if place == n_alone and meeting is not None:
                        meeting.confirm(lambda: call.check(0))
                    if isinstance(item, Post):
                        exchange.post(item.message)
                    elif isinstance(item, Receive):
                        exchange.receive(item.message)
                    elif isinstance(item, Send):
                        exchange.send(item.message)
                    elif isinstance(item, Leave):
                        exchange.leave(item.message)
                    elif isinstance(item, Action):
                        step.run_row(0, [item])
                    elif shards is not None:
                        shards.run(item, call)
                    elif isinstance(item, Reduce) and replicas is not None:
                        replicas.reduce(item.stage)
                progress.item = len(row)
                exchange.finish()
            finally:
                _running.discard(threading.get_ident())
                done.set()

        def wait() -> None:
            try:
                meanwhile(done)
            except StoppedError:  # the lane failed
                raise
            except BaseException as error:
                # The lane may wait for other ranks, who must hear of it first.
                self._ranks.fail(error)
                raise

        def awaited() -> str | None:
            others = meeting.awaited if meeting is not None else None
            own = shards.awaited if shards is not None else None
            return others or own or exchange.awaited

        with progress.running(row, awaited):
            launch(run, wait)


def _is_forward(item: Item, n: int) -> bool:
    """Whether it is one of the first n - 1 stages: with the last, gradients may begin."""
    return isinstance(item, Action) and item.kind is Kind.FORWARD and item.stage < n - 1
