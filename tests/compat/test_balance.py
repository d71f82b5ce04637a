"""Balances come from what each layer takes, measured on copies."""

import pytest
import torch
from torch import nn

from fxpipe.compat.balance import balance_by_size, balance_by_time, profile
from fxpipe.compat.balance.blockpartition import solve
from fxpipe.compat.balance.profile import layerwise_sandbox


@pytest.mark.parametrize(
    ("costs", "blocks"),
    [
        ([1, 2, 3, 4, 5, 6], [[1, 2, 3, 4], [5, 6]]),
        ([6, 5, 4, 3, 2, 1], [[6, 5], [4, 3, 2, 1]]),
        ([7, 7], [[7], [7]]),
    ],
)
def test_blocks_are_consecutive_and_about_equal(costs, blocks):
    assert solve(costs, len(blocks)) == blocks


def test_blocks_differ_by_no_more_than_one_cost_can():
    generator = torch.Generator().manual_seed(0)
    for n in range(2, 30):
        costs = torch.randint(0, 100, (n,), generator=generator).tolist()
        for k in range(1, n + 1):
            blocks = solve(costs, k)
            assert [cost for block in blocks for cost in block] == costs
            sums = [sum(block) - min(costs) * len(block) for block in blocks]
            assert max(sums) - min(sums) <= max(costs) - min(costs) + 1e-9


@pytest.mark.parametrize(("costs", "partitions"), [([1], 0), ([1], 2), ([], 1)])
def test_there_must_be_a_cost_for_each_block(costs, partitions):
    with pytest.raises(ValueError, match="partitions"):
        solve(costs, partitions)


def test_layers_are_measured_in_training_on_copies():
    class Seen(nn.BatchNorm1d):
        def forward(self, x):
            assert self.training
            return super().forward(x)

    model = nn.Sequential(Seen(4), nn.Linear(4, 4)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    balance = balance_by_time(2, model, torch.randn(8, 4), timeout=0.01, device="cpu")
    assert balance == [1, 1]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(layer.training for layer in layerwise_sandbox(model, torch.device("cpu")))


def test_tuples_pass_between_layers():
    class Twin(nn.Module):
        def forward(self, x):
            return x, x.detach()

    class Add(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    sample = torch.ones(1, requires_grad=True)
    model = nn.Sequential(Twin(), Add())
    assert balance_by_time(1, model, sample, timeout=0.01, device="cpu") == [2]


def test_a_model_that_has_gradients_is_refused():
    model = nn.Sequential(nn.Linear(1, 1))
    model(torch.ones(1)).backward()
    with pytest.raises(ValueError, match="already has gradient"):
        balance_by_time(1, model, torch.ones(1), device="cpu")


def test_sizes_are_measured_on_cuda_alone():
    with pytest.raises(ValueError, match="only CUDA"):
        balance_by_size(1, nn.Sequential(nn.Linear(1, 1)), torch.ones(1, 1), device="cpu")


def test_what_a_library_sets_up_at_a_first_call_is_no_layers(monkeypatch):
    """Stand-ins for a GPU: one whose first product takes a workspace, which stays."""
    held = {"bytes": 0}

    class Layer(nn.Linear):
        def forward(self, x):
            held["bytes"] = max(held["bytes"], 2**20)
            return super().forward(x)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held["bytes"])
    monkeypatch.setattr(profile, "layerwise_sandbox", lambda module, device: module)
    monkeypatch.setattr(profile, "_leaves", lambda value, device: value.detach())
    model = nn.Sequential(Layer(4, 4), Layer(4, 4))
    sizes = profile.profile_sizes(model, torch.ones(2, 4), 1, 1.0, torch.device("cuda"))
    assert sizes == [(4 * 4 + 4) * 4] * 2
