import pytest
import torch

from fxpipe.runtime import package


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _apart(monkeypatch):
    """Each lane has a device of its own: torch holds `cpu:0` and `cpu:1` to be different."""

    def parse_devices(devices):
        return tuple(torch.device("cpu", index) for index in range(len(devices)))

    monkeypatch.setattr(package, "parse_devices", parse_devices)
