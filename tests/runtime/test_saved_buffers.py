"""buffers.pt that lacks something is refused; what users may change in it holds."""

import json

import pytest
import torch
from flat import compile_flat
from torch import nn

from fxpipe.errors import PackageError
from fxpipe.runtime import load


class Turned(nn.Module):
    """A table that no state_dict has, and a batch norm, whose buffers its constructor makes."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("table", torch.tensor([1.0, 0.5, 0.25, 0.125]), persistent=False)
        self.inner = nn.Module()
        self.inner.register_buffer("shift", torch.arange(4.0))

    def forward(self, x):
        return self.b(torch.relu(self.norm(self.a(x) * self.table))) + self.inner.shift


@pytest.fixture
def out(tmp_path):
    x = torch.randn(8, 4)
    return compile_flat(Turned(), (x,), devices="cpu*2", microbatches=2).write(tmp_path / "out")


def change(out, **values):
    """Put values into buffers.pt; None takes one out."""
    found = torch.load(out / "buffers.pt") | values
    torch.save({name: v for name, v in found.items() if v is not None}, out / "buffers.pt")


def edit_plan(out, edit):
    plan = json.loads((out / "plan.json").read_text())
    edit(plan)
    (out / "plan.json").write_text(json.dumps(plan))


def test_without_the_file_nothing_is_loaded(out):
    (out / "buffers.pt").unlink()
    with pytest.raises(PackageError, match=r"buffers\.pt is missing\nput back what is missing"):
        load(out)


@pytest.mark.parametrize(("name", "file"), [("table", "stage_0.py"), ("inner.shift", "stage_1.py")])
def test_without_one_of_its_values_nothing_is_loaded(out, name, file):
    assert set(torch.load(out / "buffers.pt")) == {"table", "inner.shift"}
    change(out, **{name: None})
    with pytest.raises(PackageError, match=f"buffers.pt lacks '{name}', whose values {file} does"):
        load(out)


def test_a_value_of_the_users_is_what_the_buffer_begins_with(out):
    change(out, table=torch.full((4,), 3.0))
    assert torch.equal(load(out).table, torch.full((4,), 3.0))


@pytest.mark.parametrize("saved", [True, False])
def test_a_buffer_that_an_edited_stage_makes_itself_may_be_there_or_not(out, saved):
    text = (out / "stage_1.py").read_text()
    first = "super().__init__()\n"
    line = f'{first}        self.register_buffer("mine", torch.full((2,), 7.0))\n'
    (out / "stage_1.py").write_text(text.replace(first, line, 1))

    def add(plan):
        spec = {"shape": [2], "dtype": "float32", "requires_grad": False}
        of_another = next(state for state in plan["state"] if state["name"] == "table")
        plan["state"].append({**of_another, "name": "mine", "spec": spec})
        plan["stages"][1]["buffers"].append("mine")

    edit_plan(out, add)
    change(out, mine=torch.ones(2) if saved else None)
    assert torch.equal(load(out).mine, torch.ones(2) if saved else torch.full((2,), 7.0))


def test_a_file_that_plan_json_does_not_list_need_not_be_there(out):
    (out / "buffers.pt").unlink()
    edit_plan(out, lambda plan: plan["files"].pop("buffers.pt"))
    assert not load(out).table.any()
