"""Ranks forked from one process, which has imported all; each ends as a script does."""

import gc
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 90.0


@dataclass(frozen=True)
class Rank:
    """What one is called, its environment, and what it does."""

    name: str
    environment: dict[str, str]
    run: Callable[[], None]


def port() -> str:
    """One that is free, and that no connection is given by chance."""
    while True:
        with socket.socket() as server:
            number = random.randint(15000, 30000)
            try:
                server.bind(("127.0.0.1", number))
            except OSError:
                continue
            return str(number)


def start(folder: Path, ranks: Sequence[Rank]) -> dict[int, Rank] | None:
    """The ranks by their process, each of which writes into a file in `folder`.

    None in each of them, once it has run.
    """
    started = {}
    gc.freeze()
    for rank in ranks:
        pid = os.fork()
        if pid == 0:
            os.environ.update(rank.environment)
            file = os.open(folder / rank.name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            rank.run()
            return None
        started[pid] = rank
    return started


def ends(folder: Path, started: dict[int, Rank]) -> list[tuple[int | str | None, str]]:
    """Of each, its exit code, None if it was stopped, and what it has written.

    Waits until all have ended, or stopped; the latter are killed then.
    """
    codes: dict[int, int | None] = {}
    until = time.monotonic() + PATIENCE_S
    while len(codes) < len(started) and time.monotonic() < until:
        for pid in started.keys() - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if done:
                codes[pid] = None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for pid in started:
        if codes.get(pid) is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [
        (codes.get(pid, "did not end"), (folder / rank.name).read_text())
        for pid, rank in started.items()
    ]
