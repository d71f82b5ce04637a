"""Libraries hold what their workspaces give back, told by stand-ins: there may be no GPU here."""

import pytest
import torch

from fxpipe.costs.libraries import drop_workspaces

GPU = torch.device("cuda", 0)


@pytest.fixture
def held(monkeypatch):
    """Bytes on the GPU: 100 of tensors, and 65 of workspaces until they are let go of."""
    held = {"tensors": 100, "workspaces": 65}
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: sum(held.values()))
    monkeypatch.setattr(torch._C, clear, lambda: held.update(workspaces=0), raising=False)
    return held


def test_workspaces_are_let_go_of_and_counted(held):
    assert drop_workspaces(GPU) == 65
    assert drop_workspaces(GPU) == 0
    assert held == {"tensors": 100, "workspaces": 0}


def test_a_processor_has_none(held):
    assert drop_workspaces(torch.device("cpu")) == 0
    assert held["workspaces"] == 65


def test_a_graph_that_is_there_keeps_what_it_may_write_into(held):
    # Not to be captured into without a GPU, and a build without CUDA has no constructor of its own.
    new = object.__new__ if torch.version.cuda is None else torch.cuda.CUDAGraph.__new__
    graph = new(torch.cuda.CUDAGraph)
    assert drop_workspaces(GPU) == 0
    assert held["workspaces"] == 65
    del graph
    assert drop_workspaces(GPU) == 65
