"""On streams of their own, lanes read nothing before it is there: not even what the caller made.

Streams are stood in for by vector clocks: what a stream has launched is a number, and a stream that
waits for another knows what that one knew. Tensors are the CPU's.
"""

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from toys import MODES, SCHEDULES, SKIPS, TIED, both, mean_loss, same

from fxpipe.runtime import stream
from fxpipe.runtime.call import Call
from fxpipe.runtime.portal import CALLER


class Clock:
    """A stream: how much of each stream's work its next op follows."""

    def __init__(self):
        self.known = Counter()

    def launch(self):
        self.known[self] += 1
        return Counter(self.known)

    def wait_stream(self, other):
        self.known |= other.known

    def query(self):
        """Whether all is done: asked by a thread that begins."""

    def follows(self, moment):
        return all(self.known[one] >= n for one, n in moment.items())


@dataclass(frozen=True, eq=False)
class Lane:
    """A device with a stream of its own, whose tensors are on the CPU."""

    own: Clock
    place = torch.device("cpu")


@pytest.fixture
def caller(monkeypatch):
    """The stream of the thread that calls; lanes' threads have theirs while they run."""
    caller, here = Clock(), threading.local()

    def current_stream(device):
        return device.own if isinstance(device, Lane) else getattr(here, "stream", caller)

    @contextmanager
    def use_streams(streams):
        before, here.stream = getattr(here, "stream", caller), streams[0]
        yield
        here.stream = before

    monkeypatch.setattr(stream, "current_stream", current_stream)
    monkeypatch.setattr(stream, "use_streams", use_streams)
    monkeypatch.setattr(stream, "new_stream", lambda device: Clock())
    monkeypatch.setattr(stream, "place", lambda device: getattr(device, "place", device))
    return caller


@pytest.fixture
def moments(monkeypatch):
    """When each value and gradient was made; that it is read later is checked as it is read."""
    made, read = {}, Counter()
    send_value, value = Call.send_value, Call.value
    send_gradient, gradient = Call.send_gradient, Call.gradient

    def own(call, j):
        return call._links._ends[call.lane(j)][0].compute

    def seen_send_value(call, wire, i, tensor, has_gradient):
        made["value", wire, i] = own(call, wire.source).launch()
        send_value(call, wire, i, tensor, has_gradient)

    def seen_value(call, wire, j, i):
        found = value(call, wire, j, i)
        if wire.source != CALLER:
            assert own(call, j).follows(made["value", wire, i])
        read["value"] += 1
        return found

    def seen_send_gradient(call, wire, j, i, tensor):
        made["gradient", wire, j, i] = own(call, j).launch()
        send_gradient(call, wire, j, i, tensor)

    def seen_gradient(call, wire, i):
        found = gradient(call, wire, i)
        if found is not None and wire.source != CALLER:
            for j in call.wires.readers[wire]:
                assert own(call, wire.source).follows(made["gradient", wire, j, i])
            read["gradient"] += 1
        return found

    monkeypatch.setattr(Call, "send_value", seen_send_value)
    monkeypatch.setattr(Call, "value", seen_value)
    monkeypatch.setattr(Call, "send_gradient", seen_send_gradient)
    monkeypatch.setattr(Call, "gradient", seen_gradient)
    return read


def on_own_streams(folder, toy, **settings):
    model, pipe = both(folder, toy, **settings)
    pipe._devices = tuple(Lane(Clock()) for _ in pipe._devices)
    return model, pipe


@pytest.mark.parametrize("toy", [SKIPS, TIED], ids=["skips", "tied"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_are_there_when_a_step_reads_them(
    tmp_path, caller, moments, mode, schedule, toy
):
    _, pipe = on_own_streams(tmp_path, toy, schedule=schedule, checkpoint=mode)
    _, plain = both(tmp_path, toy, schedule=schedule, checkpoint=mode)
    before = caller.launch()
    loss = pipe.step(*toy.inputs(), loss_fn=mean_loss)
    assert moments["value"] > 0
    assert moments["gradient"] > 0
    for lane in pipe._devices:
        assert lane.own.follows(before)
        assert caller.follows(lane.own.known)
    assert same(loss, plain.step(*toy.inputs(), loss_fn=mean_loss))


@pytest.mark.parametrize("mode", MODES)
def test_values_are_there_when_a_call_reads_them(tmp_path, caller, moments, mode):
    _, pipe = on_own_streams(tmp_path, SKIPS, checkpoint=mode)
    before = caller.launch()
    output = pipe(*SKIPS.inputs())
    assert moments["value"] > 0
    for lane in pipe._devices:
        assert lane.own.follows(before)
        assert caller.follows(lane.own.known)
    mean_loss(output).backward()


def test_the_caller_follows_lanes_that_failed(tmp_path, caller):
    _, pipe = on_own_streams(tmp_path, SKIPS)

    def loss_fn(output, target):
        pipe._devices[-1].own.launch()
        raise KeyError("no loss")

    with pytest.raises(Exception, match="loss_fn failed"):
        pipe.step(*SKIPS.inputs(), loss_fn=loss_fn)
    assert all(caller.follows(lane.own.known) for lane in pipe._devices)


def test_in_order_on_one_thread_all_streams_join_the_callers(tmp_path, caller, moments):
    _, pipe = on_own_streams(tmp_path, SKIPS, schedule="1f1b")
    before = caller.launch()
    inputs = list(SKIPS.inputs())
    pipe._step(pipe._run_in_order, inputs, None, lambda output, target: mean_loss(output), None)
    assert moments["gradient"] > 0
    copies = [one for lane in pipe._workers.copies for one in lane]
    for one in (*copies, *(lane.own for lane in pipe._devices)):
        assert caller.follows(one.known)
    assert all(lane.own.follows(before) for lane in pipe._devices)
