"""What crosses has one name: where it is made, in plan.json, and where it is taken."""

import re

import torch
from flat import verified
from torch import nn


class Net(nn.Module):
    """Two values of one name cross a cut, and the one that is made last is read first."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 4)
        self.c = nn.Linear(4, 4)
        self.d = nn.Linear(10, 3)

    def forward(self, image):
        x = skip = self.a(image)
        x = self.b(x.relu())
        x = self.c(x)
        return self.d(torch.cat([x, skip], dim=1))


class Rows(nn.Module):
    """A layer for each row of a buffer, of which some cross a cut."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("scales", torch.rand(4, 6))

    def forward(self, image):
        for layer, scale in zip(self.layers, self.scales, strict=True):
            image = layer(image).sin() * scale
        return image


def rows(batch):
    return {"image": torch.randn(batch, 6)}


def crossing(text, word):
    """What a stage says that it takes, or returns: shapes by name."""
    return dict(re.findall(rf"^{word} (\w+): (\S+ ?\w*\])", text, flags=re.MULTILINE))


def test_a_value_has_one_name_in_both_stages_and_in_the_plan(tmp_path):
    package = verified(Net, rows, tmp_path)
    first, second = (package.files[f"stage_{j}.py"] for j in range(2))
    assert crossing(first, "Returns") == crossing(second, "Takes")
    assert crossing(first, "Returns") == {
        output.value: str(output.spec) for output in package.manifest.stages[0].outputs
    }


def test_what_the_model_goes_on_with_has_no_number(tmp_path):
    package = verified(Net, rows, tmp_path)
    assert crossing(package.files["stage_0.py"], "Returns") == {
        "x_2": "float32[batch, 6]",
        "x": "float32[batch, 4]",
    }


def test_what_a_loop_takes_of_a_tensor_is_numbered_by_place(tmp_path):
    package = verified(Rows, rows, tmp_path)
    first, second = (package.files[f"stage_{j}.py"] for j in range(2))
    assert "scale_0, scale_1, scale_2, scale_3 = self.scales.unbind(0)" in first
    assert ".sin() * scale_2" in second
    assert ".sin() * scale_3" in second
