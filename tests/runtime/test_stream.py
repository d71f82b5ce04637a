"""Device lists are read, or refused with the way out."""

import pytest
import torch

from fxpipe.errors import DeviceError
from fxpipe.runtime.stream import parse_devices

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "count"),
    [("cpu", 1), ("cpu*4", 4), ("cpu,cpu", 2), (" cpu*2 , cpu:0", 3), (["cpu", CPU], 2), (CPU, 1)],
)
def test_lists(text, count):
    assert parse_devices(text) == (CPU,) * count


@pytest.mark.parametrize("count", [3, "3"])
def test_a_count_means_cuda_devices_if_there_are_enough_else_lanes(count, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_devices(count) == (CPU,) * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert parse_devices(count) == tuple(torch.device("cuda", k) for k in range(3))


@pytest.mark.parametrize("text", ["", "0", "cpu*0", "gpu:0", "mps", "cuda:99", "cpu;cpu", [], 2.5])
def test_what_cant_be_read_or_is_not_there(text):
    with pytest.raises(DeviceError):
        parse_devices(text)
