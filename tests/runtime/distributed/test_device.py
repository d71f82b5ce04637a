"""Which device a process runs on, told by stand-ins: there may be none but the CPU here."""

from types import SimpleNamespace

import pytest
import torch

from fxpipe.errors import DeviceError
from fxpipe.runtime.distributed import device as rank_device
from fxpipe.runtime.distributed.device import device_of, room_bytes


@pytest.fixture
def gpus(monkeypatch):
    """As where there are GPUs and NCCL."""
    monkeypatch.setattr(rank_device, "parse_devices", lambda names: (torch.device(names),))
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)


PLAN = SimpleNamespace(devices=("cuda:0", "cuda:1", "cuda:2", "cuda:3"))


def test_a_process_has_the_gpu_of_its_place_on_its_host(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of(PLAN, None, 3) == torch.device("cuda:1")
    assert device_of(PLAN, "cuda:0", 3) == torch.device("cuda:0")
    monkeypatch.delenv("LOCAL_RANK")
    assert device_of(PLAN, None, 3) == torch.device("cuda:3")


def test_without_nccl_the_error_says_what_to_give(gpus, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    with pytest.raises(DeviceError, match="built without: give devices='cpu'"):
        device_of(PLAN, None, 0)


def test_several_devices_for_one_process_are_refused():
    with pytest.raises(DeviceError, match="one device, 2 were given"):
        device_of(PLAN, "cpu*2", 0)


def test_processes_of_a_host_share_its_memory_and_no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (80, 80))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 0)
    assert room_bytes(torch.device("cuda", 1), 8) == 80
    cpu = torch.device("cpu")
    assert room_bytes(cpu, 8) == room_bytes(cpu, 1) // 8
