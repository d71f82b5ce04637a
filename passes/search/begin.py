"""One candidate that a search begins with: stages of equal time, on the devices of a map."""

import time
from collections.abc import Iterator
from dataclasses import replace

from fxpipe.passes.partition_path import even_path
from fxpipe.passes.search.fit import fitted
from fxpipe.passes.search.judge import Candidate, Found, Judge
from fxpipe.schedule import Schedule

_EIGHTHS = (0, 4, 2, 6, 1, 3, 5, 7)  # of the steps of memory's price: those tried
_ROUNDS = 3


def begun(judge: Judge, shape: tuple[int, ...], table: Schedule | None, until: float) -> Found:
    """Equal times, where all is computed again; then each device as little as fits.

    Where there is no table, devices choose: at that price of memory, and with so many backwards in
    halves, that the step is shortest. Of those no more are tried after `until`, a monotonic time.
    """
    problem, n = judge.problem, len(shape)
    m = problem.n_microbatches
    groups = 1, problem.n_devices, m
    last, (_, *fewer) = len(judge.prices) - 1, judge.halvings
    # Where halves cost something, the whole backwards of a table stay so.
    whole = table is not None and not table.split and len(fewer) > 0
    path = even_path(problem.chain, problem.edges, n)
    begins = Candidate(path, shape, (last,) * n, 0 if whole else m, table)
    found = judge(begins, groups, _ROUNDS)
    work = found.work

    def others() -> Iterator[Candidate]:
        for eighths in _EIGHTHS if last else ():
            yield replace(found.candidate, prices=(last * eighths // 8,) * n)
        for halved in fewer:
            yield replace(found.candidate, halved=halved)

    for candidate in others() if table is None else ():
        if time.monotonic() > until:
            break
        tried = judge(candidate, groups, _ROUNDS)
        work += tried.work
        found = min(found, tried, key=lambda one: one.worth)
    best = fitted(judge, found, reach=last)
    return replace(best, work=work + best.work - found.work)
