"""Parts of a GPU are measured while all are at it, told by stand-ins: there may be no GPU here."""

import math
from contextlib import nullcontext

import models
import pytest
import torch

from fxpipe.capture import capture
from fxpipe.costs import launching, whole_gpu
from fxpipe.costs.twin import Twin
from fxpipe.runtime.device_names import parse_devices
from fxpipe.runtime.lanes import Lanes
from fxpipe.runtime.virtual import VirtualDevice

PARTS = [VirtualDevice(0, 2, 0), VirtualDevice(0, 2, 1)]


@pytest.fixture
def seen(monkeypatch):
    """What is asked of streams, each of which is its part's index; every phase takes `ms`."""
    seen = Seen()
    monkeypatch.setattr(whole_gpu, "place", lambda part: torch.device("cpu"))
    for module in (whole_gpu, launching):
        monkeypatch.setattr(module, "current_stream", lambda part: part.index)
        monkeypatch.setattr(module, "use_streams", lambda streams: nullcontext())
        monkeypatch.setattr(module, "synchronize", lambda part: seen.append(f"wait {part.index}"))
    monkeypatch.setattr(whole_gpu, "hold_up", lambda on, ms: seen.append(f"hold up {on}"))
    monkeypatch.setattr(whole_gpu, "mark", lambda on: seen.append(f"mark {on}"))
    monkeypatch.setattr(whole_gpu, "ms_between", lambda start, end: seen.ms)
    monkeypatch.setattr(whole_gpu, "Lanes", lambda devices: Lanes(parse_devices("cpu*2")))
    return seen


class Seen(list):
    ms = 0.0

    @property
    def longest(self):
        """The most marks that no wait parts."""
        stretches = "".join("|" if note.startswith("wait") else note[0] for note in self)
        return max(stretch.count("m") for stretch in stretches.split("|"))


def measured():
    model, x = models.Norms().train(), torch.randn(4, 3, 8, 8)
    return whole_gpu.whole_on_gpus(capture(model, (x,), {}), [x], PARTS)


def test_all_parts_are_held_up_until_all_is_launched(seen):
    """To wait for one that is held up would let the others begin one by one."""
    measured()
    assert seen[:10] == [
        *("wait 0", "wait 1", "hold up 0", "hold up 1"),
        *("mark 0", "mark 0", "mark 1", "mark 1", "wait 0", "wait 1"),
    ]
    assert seen.longest == 2 * 2  # a phase, start and end of each part


def test_parts_that_are_slower_than_the_host_have_no_rest(seen):
    """A GPU that rests in between has a faster clock than in a step."""
    seen.ms = 1000.0
    found, _ = measured()
    turn = 7 * 2 * 2  # phases, parts, start and end
    assert seen.longest == 6 * turn
    assert found == (1000.0, 1000.0, 2000.0, 1000.0)


@pytest.mark.parametrize("ms", [0.0, 1000.0])
def test_ops_that_refuse_halves_are_measured_whole(seen, monkeypatch, ms):
    def refuse(self):
        self.backward()
        raise RuntimeError("not in halves")

    monkeypatch.setattr(Twin, "input_gradients", refuse)
    seen.ms = ms
    assert measured()[0] == (ms, ms, math.inf, ms)


def test_what_the_host_takes_is_measured_by_itself(seen):
    """Of ops that take a GPU no time at all."""
    _, launch = measured()
    assert min(launch.forward_ms, launch.backward_ms, launch.loss_ms) > 0
    assert 0 <= launch.serial <= 1
