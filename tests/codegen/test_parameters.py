"""Parameters that no attribute can be called stand in the list or dict that they stood in."""

import re

import pytest
import torch
from flat import compile_flat, verified
from torch import nn


class Scales(nn.Module):
    """A list of weights, used in another order, and a dict with a keyword for a key."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(6) for _ in range(3))
        self.scales = nn.ParameterDict({"in": torch.ones(6), "out": torch.rand(6)})

    def forward(self, x):
        x = x * self.scales["in"]
        for weight in reversed(self.weights):
            x = x + torch.tanh(x @ weight)
        return x * self.scales["out"]


class Model(nn.Module):
    """`half` is a method of modules, and here a tensor."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scales() for _ in range(3))
        self.last = nn.Linear(6, 6)
        self.tied = nn.ParameterList([self.last.weight, torch.rand(6)])
        self.half = torch.full((6,), 0.5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) + self.half
        return self.last(x) @ self.tied[0] * self.tied[1]


class Counting(nn.Module):
    """As `half`, and forward assigns it anew."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.half = torch.full((6,), 0.5)

    def forward(self, x):
        self.half = self.half + 1
        return self.layer(x) * self.half


def rows(batch):
    return {"x": torch.randn(batch, 6)}


def test_a_list_and_a_dict_are_made_as_such():
    torch.manual_seed(0)
    files = compile_flat(Model(), kwargs=rows(4), devices=1, microbatches=2).files
    block, stage = ("".join(files[name].split("\n")) for name in ("blocks.py", "stage_0.py"))
    assert re.search(
        r"self\.weights = nn\.ParameterList\( *nn\.Parameter.* for _ in range\(3\)", block
    )
    assert '"in": nn.Parameter(torch.ones(6))' in block
    assert 'x = x * self.scales["in"]' in block
    assert "x = x + torch.tanh(x @ self.weights[2])" in block
    assert "self.last(x) @ self.last.weight * self.tied[" in stage
    assert "getattr" not in block + stage


@pytest.mark.parametrize("devices", [2, 4])
def test_they_are_the_plain_ones_wherever_they_are_cut(devices, tmp_path):
    verified(Model, rows, tmp_path, devices=devices)


def test_a_tensor_that_hides_a_method_may_be_assigned_in_forward():
    model = Counting()
    half = model.half
    stage = compile_flat(model, kwargs=rows(4), devices=1, microbatches=2).files["stage_0.py"]
    assert 'register_buffer("half_"' in stage.replace("'", '"')
    assert "half_.copy_(" in stage
    assert model.half is half
    assert not hasattr(model, "half_")
