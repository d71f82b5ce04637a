"""What ranks post for each other in the store of `torch.distributed`: where they are, what failed.

One process keeps the store: torchrun's, or the first rank. If that is stopped or cut off, what asks
it waits forever. So a thread of its own does, and nobody waits for that thread for long.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import zip_longest
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
Question = Callable[[Store], object]

_LOOK_S = 0.3  # how often it looks for a failure, and posts where its rank is
_SILENT_S = 2.0  # how long a rank that lives is never silent
_ANSWER_S = 3.0  # how long the store may take to answer
_END_S = 0.2  # how long the thread may take to end
_ABSENT = b"0 has not come"


class Board:
    """The board as `rank` of `size` sees it; `line` says where that rank is.

    `failure` is what the first rank that failed has posted, once this one has seen it; `lost` why
    the store is gone.
    """

    def __init__(self, store: Store, rank: int, size: int, line: Callable[[], str]) -> None:
        self.failure: str | None = None
        self.lost: str | None = None
        self.rank = rank
        self.size = size
        self._line = line
        self._beat = 0
        self._sampled: tuple[float, list[int]] = (0.0, [])
        self._questions: SimpleQueue[Question | None] = SimpleQueue()
        self._answer: Future[Any] = Future()  # that was waited for last
        self._answer.set_result(None)
        self._thread = threading.Thread(
            target=self._serve, args=(store,), name="fxpipe board", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless the store holds it."""
        self._questions.put(None)
        self._thread.join(_END_S)

    def count(self, name: str, more: int) -> int | None:
        """How many ranks have reached `name`, once `more` are added; None without an answer."""
        return self._ask(lambda store: store.add(name, more))

    def first(self, failure: str) -> str:
        """What the first rank that failed has posted: `failure` if none had."""
        answer = self._ask(lambda store: store.compare_set("failed", "", failure))
        return failure if answer is None else answer.decode()

    def sample(self) -> None:
        """Have a look at the ranks' signs of life, to compare with those of `lines`."""

        def look(store: Store) -> None:
            self._sampled = time.monotonic(), [beat for beat, _ in self._posts(store)]

        self._questions.put(look)

    def lines(self) -> list[tuple[str, bool]] | None:
        """Where each rank is by what it posted last, and whether it lives no more, as far as seen.

        None without an answer.
        """
        time.sleep(2 * _LOOK_S)  # those that live post once more
        posts = self._ask(self._posts)
        if posts is None:
            return None
        at, before = self._sampled
        silent_s = time.monotonic() - at
        lines = []
        for (beat, line), then in zip_longest(posts, before):
            silent = beat == then and silent_s > _SILENT_S
            lines.append(
                (f"{line}; no sign of life for {silent_s:.0f} s" if silent else line, silent)
            )
        return lines

    def _ask(self, question: Callable[[Store], T]) -> T | None:
        if self.lost is not None or not self._answer.done():
            return None
        answer: Future[T] = Future()
        self._answer = answer
        self._questions.put(lambda store: answer.set_result(question(store)))
        with suppress(TimeoutError):
            return answer.result(_ANSWER_S)
        return None

    def _serve(self, store: Store) -> None:
        try:
            # A store lets one ask at a time: others go on where this thread is held.
            store = store.clone()  # type: ignore[attr-defined]
            self._look(store)
            while True:
                try:
                    question = self._questions.get(timeout=_LOOK_S)
                except Empty:
                    question = self._look
                if question is None:
                    return
                question(store)
        except DistError as error:
            self.lost = str(error).partition("\n")[0]

    def _posts(self, store: Store) -> list[tuple[int, str]]:
        """Of each rank, how often it has posted, and what it did last."""
        keys = [_key(rank) for rank in range(self.size)]
        if store.check(keys):
            found = store.multi_get(keys)
        else:
            found = [store.get(key) if store.check([key]) else _ABSENT for key in keys]
        parts = [text.decode().partition(" ") for text in found]
        return [(int(beat), line) for beat, _, line in parts]

    def _look(self, store: Store) -> None:
        if self.failure is None and store.check(["failed"]):
            self.failure = store.get("failed").decode()
        self._beat += 1
        store.set(_key(self.rank), f"{self._beat} {self._line()}")


def _key(rank: int) -> str:
    return f"rank {rank}"
