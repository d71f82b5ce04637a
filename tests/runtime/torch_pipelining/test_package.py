"""Stages for torch.distributed.pipelining, told by stand-ins: there may be no GPU here."""

import pytest
import torch
import torch.distributed as dist
import toys

from fxpipe.errors import DeviceError, PackageError
from fxpipe.runtime.torch_pipelining import package


def test_ranks_meet_on_their_own_gpus(tmp_path, monkeypatch):
    """NCCL gathers objects by way of the current one."""
    toys.write(tmp_path, toys.CHAIN)
    n = len(toys.CHAIN.parts)
    current = []

    def refuse(config, device):
        raise DeviceError(f"no backend for {device}")

    def gather(found, mine, group):
        assert current == [torch.device("cuda", 1)]
        found[:] = [mine] * n

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: n)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(package, "device_of", lambda *_: torch.device("cuda", 1))
    monkeypatch.setattr(package.stream, "hardware", lambda device: None)
    monkeypatch.setattr(package, "refuse_backend", refuse)
    with pytest.raises(PackageError, match="no backend for cuda:1"):
        package.to_torch_pipelining(tmp_path)
