"""How often an op is timed, and what of it counts."""

import time
from collections.abc import Iterator
from itertools import chain, repeat

import pytest
import torch

from fxpipe.stopwatch import StopWatch

CPU = torch.device("cpu")


def timed(monkeypatch: pytest.MonkeyPatch, *first_ms: float, then_ms: float) -> tuple[float, int]:
    """The milliseconds told of an op that takes these at first and others then, and its runs."""
    took_ms: Iterator[float] = chain(first_ms, repeat(then_ms))
    now_s, runs = 0.0, 0

    def run(_: object) -> None:
        nonlocal now_s, runs
        now_s += next(took_ms) / 1e3
        runs += 1

    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: now_s)
    ms = StopWatch(CPU)(run, lambda: None)
    monkeypatch.undo()
    return ms, runs


def test_a_short_op_is_run_six_times_and_the_first_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert timed(monkeypatch, 9.0, then_ms=1.0) == (pytest.approx(1.0), 6)


def test_a_run_that_something_held_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # It took as long as is enough of an op.
    assert timed(monkeypatch, 90.0, then_ms=6.0) == (pytest.approx(6.0), 6)
    assert timed(monkeypatch, 6.0, 90.0, then_ms=6.0) == (pytest.approx(6.0), 4)


def test_an_op_of_many_ms_is_timed_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed(monkeypatch, then_ms=60.0) == (pytest.approx(60.0), 4)


def test_an_op_that_takes_very_long_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed(monkeypatch, then_ms=900.0) == (pytest.approx(900.0), 1)
