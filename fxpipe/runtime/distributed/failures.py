"""How one rank's failure becomes that of all: each says what has failed, and ends."""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.errors import FxpipeError, StageError
from fxpipe.runtime.distributed.board import Board
from fxpipe.runtime.distributed.progress import Progress

_NEVER = 2  # a tag that nobody sends with
_TOLD = 4096  # characters of an error, and of its notes
_STAY_S = 5.0  # how long a rank stays, after a failure, for the others to hear of it


class Failures:
    """What a rank has `heard` of failures; `groups` are those that it may wait in."""

    def __init__(self, board: Board, progress: Progress, groups: Sequence[Any]) -> None:
        self._board = board
        self._progress = progress
        self._groups = groups
        self.heard: str | None = None

    def refuse(self) -> None:
        """Raise StageError if a rank has failed before."""
        if self.heard is not None:
            raise StageError(f"{self.heard}. Its pipeline has ended: start all processes again")

    def look(self) -> None:
        """Raise StageError if a rank is known to have failed."""
        if self._board.failure is not None:
            raise self._hear(self._board.failure)
        if self._board.lost is not None:
            raise self.lose(
                f"has lost the process that keeps torch.distributed's store: {self._board.lost}"
            )

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends for `error`, unless it does since it was told.

        Raises StageError instead if another rank has failed before.
        """
        if self.heard is not None:
            return
        own = f"rank {self._board.rank} failed: {_told(error)}"
        first = self._first(own, None)
        if first is not None:
            raise self._hear(first) from error
        self._end(own, 0)

    def lose(self, why: str, n_lost: int = 0, near: Collection[int] = ()) -> StageError:
        """The error to raise where this rank can't go on for want of others, `n_lost` or more.

        It tells where those `near` are, and which give no sign of life; without an answer of the
        store, where this one is.
        """
        own = f"rank {self._board.rank} {why}"
        lines = self._board.lines()
        if lines is None:
            told = "The store of torch.distributed doesn't answer. Where this rank is:"
            shown = [f"rank {self._board.rank} {self._progress}"]
        else:
            told = "What each has told last:"
            n_lost = max(n_lost, sum(silent for _, silent in lines))
            shown = [
                f"rank {rank} {line}"
                for rank, (line, silent) in enumerate(lines)
                if silent or rank in near
            ]
        whole = "\n  ".join([f"{own}. {told}", *shown])
        first = self._first(whole, n_lost)
        if first is not None:
            return self._hear(first, own)
        self._end(whole, n_lost)
        return StageError(whole)

    def _first(self, text: str, n_lost: int | None) -> str | None:
        """Post `text`, and give what another rank has posted before, if one has."""
        posted = f"{'failed' if n_lost is None else n_lost} {text}"
        first = self._board.first(posted)
        return None if first == posted else first

    def _hear(self, first: str, own: str | None = None) -> StageError:
        lost, _, text = first.partition(" ")
        n_lost = int(lost) if lost != "failed" else 0
        if own is None and lost != "failed" and self._progress.waiting is not None:
            own = f"rank {self._board.rank} {self._progress.waiting}"
        if own is not None:
            text = f"{own}\n{text}"
        self._board.count("heard", 1)
        self._end(text, n_lost)
        return StageError(text)

    def _end(self, text: str, n_lost: int) -> None:
        """Stay until all that can have heard: torchrun ends all processes as soon as one ends."""
        self.heard = text
        until = time.monotonic() + _STAY_S
        while time.monotonic() < until:
            heard = self._board.count("heard", 0)
            if heard is None or heard >= self._board.size - 1 - n_lost:
                break
            time.sleep(0.02)
        self._cancel()

    def _cancel(self) -> None:
        """End all waits in the groups, on this rank and its peers.

        Gloo does so where one of them takes too long; else their threads could not end.
        """
        for group in self._groups:
            for peer in range(group.size()):
                if peer != group.rank():
                    with suppress(RuntimeError):
                        work = dist.irecv(torch.empty(1), group=group, tag=_NEVER, group_src=peer)
                        assert work is not None
                        work.wait(timedelta(milliseconds=1))


def _told(error: BaseException) -> str:
    """An error in words, with its notes; of long ones the beginning."""
    said, kind = str(error), type(error).__name__
    text = said if isinstance(error, FxpipeError) else f"{kind}: {said}" if said else kind
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{_beginning(text)} ({_beginning(notes)})" if notes else _beginning(text)


def _beginning(text: str) -> str:
    """As much of it as is told, in characters that UTF-8 has: the store takes no others, nor 8 MiB.

    Where it failed stands in front.
    """
    left = len(text) - _TOLD
    shown = text if left <= 0 else f"{text[:_TOLD]}... and {left} more characters"
    return shown.encode(errors="backslashreplace").decode()
