"""Device lists are read, or refused with the way out."""

import pytest
import torch

from fxpipe.errors import DeviceError
from fxpipe.runtime import virtual
from fxpipe.runtime.device_names import all_devices, count_devices, parse_devices
from fxpipe.runtime.virtual import VirtualDevice

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


@pytest.mark.parametrize(
    ("text", "count"),
    [("3", 3), ("cuda:0,cuda:1", 2), ("cuda:0/4", 4), ("cuda:0/4#1,cpu*2", 3), ("cuda*8", 8)],
)
def test_devices_are_counted_that_are_not_here(text, count, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert count_devices(text) == count


@pytest.mark.parametrize("text", ["", "0", "cpu*0", "cpu/4", "gpu:0", "mps:1", "cpu*5000"])
def test_what_is_no_device_is_not_counted(text):
    with pytest.raises(DeviceError):
        count_devices(text)


def test_all_devices_are_the_gpus_or_else_two_lanes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert all_devices() == (CPU,) * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert all_devices() == tuple(torch.device("cuda", k) for k in range(3))


def test_a_gpu_is_cut_and_its_groups_have_names_that_say_which(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        virtual, "cut", lambda gpu, of: tuple(VirtualDevice(gpu, of, k) for k in range(of))
    )
    four = parse_devices("cuda:1/4")
    assert [str(device) for device in four] == [f"cuda:1/4#{k}" for k in range(4)]
    assert parse_devices([str(device) for device in four]) == four
    assert parse_devices("cuda:0/2#1,cpu") == (VirtualDevice(0, 2, 1), CPU)
    assert parse_devices(four[2]) == (four[2],)
    with pytest.raises(DeviceError, match="its groups are #0 to #1"):
        parse_devices("cuda:0/2#2")


@pytest.mark.parametrize("text", ["cuda:0/4", "cuda:99/2", "cuda:99/2#1"])
def test_without_that_gpu_it_cant_be_cut(text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="this machine has 0 CUDA devices"):
        parse_devices(text)


@pytest.mark.parametrize(
    "text",
    [
        "cpu/4",
        "cuda:0/2*2",
        "cuda:0/2#",
        "",
        "0",
        "cpu*0",
        "gpu:0",
        "mps",
        "cuda:99",
        "cpu;cpu",
        "9" * 5000,
        "cpu*99999999999999999999",
        ["cpu*4000", "cpu*4000"],
        [],
        2.5,
    ],
)
def test_what_cant_be_read_or_is_not_there(text):
    with pytest.raises(DeviceError):
        parse_devices(text)
