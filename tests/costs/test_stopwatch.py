"""How often an op is timed, and what of it counts."""

import time
from collections.abc import Iterator
from itertools import chain, repeat

import pytest
import torch

from fxpipe.costs import stopwatch
from fxpipe.costs.stopwatch import StopWatch

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


def test_a_first_run_that_sets_something_up_does_not_count_however_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert timed(monkeypatch, 900.0, then_ms=6.0) == (pytest.approx(6.0), 6)


def test_an_op_that_takes_very_long_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed(monkeypatch, then_ms=900.0) == (pytest.approx(900.0), 2)


def test_a_gpu_is_held_up_while_the_host_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the second run took to launch; neither that nor the first counts."""
    launch_s, events_ms = iter([9.0, 0.002, *[0.003] * 5]), iter([700.0, 8.0, *[2.0] * 5])
    held_up_ms: list[float] = []
    now_s = 0.0

    def run(_: object) -> None:
        nonlocal now_s
        now_s += next(launch_s)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(stopwatch, "synchronize", lambda device: None)
    monkeypatch.setattr(stopwatch, "hold_up", lambda stream, ms: held_up_ms.append(ms))
    monkeypatch.setattr(stopwatch, "mark", lambda stream: None)
    monkeypatch.setattr(stopwatch, "ms_between", lambda start, end: next(events_ms))
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    ms = StopWatch(torch.device("cuda", 0))(run, lambda: None)
    monkeypatch.undo()

    assert ms == 2.0
    assert held_up_ms == [0.0, 0.0, *[pytest.approx(4.0)] * 5]
