"""What a host takes to launch, told by twins whose phases take so many ticks of a clock."""

import pytest

from fxpipe.costs import launching as module
from fxpipe.runtime.device_names import parse_devices

LANES = parse_devices("cpu*4")
N_OPS = 2


class Clock:
    def __init__(self):
        self.now_ms = 0.0

    def __call__(self):
        return self.now_ms / 1e3


class Twin:
    """A micro-batch goes forward and back; each phase takes the host some milliseconds."""

    def __init__(self, clock):
        self.clock = clock
        self.done = []

    def forward(self):
        self._take("forward", 3.0)

    def loss(self):
        self._take("loss", 1.0)

    def backward(self):
        assert self.done.count("loss") > self.done.count("backward")
        self._take("backward", 6.0)

    def _take(self, phase, ms):
        self.done.append(phase)
        self.clock.now_ms += ms


class ByTurns:
    """Lanes of which only one gets on at a time."""

    def run(self, jobs, stop):
        for job in jobs:
            job()


class Apart:
    """Lanes that don't hinder each other."""

    def __init__(self, clock):
        self.clock = clock

    def run(self, jobs, stop):
        began, ends = self.clock.now_ms, []
        for job in jobs:
            self.clock.now_ms = began
            job()
            ends.append(self.clock.now_ms)
        self.clock.now_ms = max(ends)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", clock)
    for name in ("_FORWARD", "_BACKWARD"):
        phases = tuple(getattr(Twin, phase.__name__) for phase in getattr(module, name))
        monkeypatch.setattr(module, name, phases)
    return clock


def found(clock, lanes, n_parts):
    twins = [Twin(clock) for _ in range(n_parts)]
    return module.launching([*zip(LANES[:n_parts], twins, strict=True)], lanes, N_OPS)


def test_ops_share_what_a_phase_takes(clock):
    launch, together_ms = found(clock, ByTurns(), 1)
    assert (launch.forward_ms, launch.backward_ms, launch.loss_ms) == pytest.approx((1.5, 3.0, 1.0))
    assert (launch.serial, together_ms) == pytest.approx((1.0, 10.0))


@pytest.mark.parametrize("n_parts", [2, 4])
def test_threads_that_take_turns_have_nothing_for_themselves(clock, n_parts):
    launch, together_ms = found(clock, ByTurns(), n_parts)
    assert (launch.serial, together_ms) == pytest.approx((1.0, 10.0 * n_parts))


@pytest.mark.parametrize("n_parts", [2, 4])
def test_threads_that_launch_apart_share_nothing(clock, n_parts):
    launch, together_ms = found(clock, Apart(clock), n_parts)
    assert (launch.serial, together_ms) == pytest.approx((0.0, 10.0))


def test_a_host_that_waits_for_its_gpus_is_taken_for_no_slower_than_by_turns(clock):
    class Waiting(ByTurns):
        def run(self, jobs, stop):
            super().run(jobs, stop)
            clock.now_ms += 1000.0

    launch, together_ms = found(clock, Waiting(), 2)
    assert (launch.serial, together_ms) == pytest.approx((1.0, 20.0))


def test_at_once_there_are_parts_at_both_and_in_the_end_nothing_is_in_flight(clock):
    begun = []

    class Noting(ByTurns):
        def run(self, jobs, stop):
            for job, twin in zip(jobs, twins, strict=True):
                n = len(twin.done)
                job()
                begun.append(twin.done[n])

    twins = [Twin(clock) for _ in range(4)]
    module.launching([*zip(LANES, twins, strict=True)], Noting(), N_OPS)
    assert begun[:4] == ["forward", "backward", "forward", "backward"]
    assert all(twin.done.count("backward") == twin.done.count("forward") for twin in twins)


def test_each_phase_finds_its_gpu_with_nothing_to_do(clock, monkeypatch):
    """Else a host that is thousands of launches ahead is held up, which is no time of its own."""
    twin, waits = Twin(clock), []
    monkeypatch.setattr(module, "synchronize", lambda device: waits.append(len(twin.done)))
    module.launching([(LANES[0], twin)], ByTurns(), N_OPS)
    assert waits[:4] == [0, 1, 2, 3]
