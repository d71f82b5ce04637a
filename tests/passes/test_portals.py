"""Portals: a value goes straight from its maker to each stage that reads it."""

import models
import pytest
import torch
from flat import compile_flat
from torch import nn


def ports(package):
    """Each stage's inputs as `value from stage`, `~` for a portal, `<` for the caller's."""
    return [
        [
            f"{'~' if port.portal else ''}{port.value}{'<' if port.source is None else port.source}"
            for port in stage.inputs
        ]
        for stage in package.wiring.stages
    ]


def test_a_skip_over_a_stage_is_a_portal_and_passes_no_stage_between():
    package = compile_flat(models.Skip(), (torch.randn(4, 6),), devices="cpu*3", microbatches=2)
    assert ports(package) == [["x<"], ["x_20"], ["x_51", "~skip0"]]


def test_a_value_with_two_later_readers_has_two_ports():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            skip = self.layers[0](x)
            x = self.layers[1](skip)
            x = self.layers[2](x) + skip
            return self.layers[3](x) + skip

    package = compile_flat(Twice(), (torch.randn(4, 6),), devices="cpu*4", microbatches=2)
    portals = [port for stage in package.wiring.stages for port in stage.inputs if port.portal]
    assert {(port.value, port.source) for port in portals} == {("skip", 0)}
    assert len(portals) == 2


def test_a_stage_that_needs_the_batch_size_is_given_a_value_that_has_it():
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)

        def forward(self, x):
            total = self.b(self.a(x).sum(0))
            return total.expand(x.size(0), -1)

    package = compile_flat(Sized(), (torch.randn(4, 6),), devices="cpu*3", microbatches=2)
    assert "x<" in ports(package)[2]
    assert "batch = x.size(0)" in package.files["stage_2.py"]


@pytest.mark.parametrize("devices", ["cpu*2", "cpu*3"])
def test_a_caller_value_goes_to_each_stage_that_reads_it(devices):
    pair = (torch.randn(4, 6), torch.randn(4, 6))
    package = compile_flat(
        models.Structured(), (pair,), {"weight": torch.randn(6)}, devices=devices, microbatches=2
    )
    assert any("weight<" in names for names in ports(package)[1:])
    assert not any(
        port.portal for s in package.wiring.stages for port in s.inputs if port.source is None
    )
