"""A model without memory: no parameter has values, buffers do, and what is emitted is the same."""

import copy
import logging
from unittest import mock

import models
import pytest
import torch
from flat import compile_flat
from makers import MAKERS, built, captured, captured_bare, target_of
from torch import nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.errors import InputError, TargetError
from fxpipe.memory import faked, lacks_memory, storage_of
from fxpipe.target import Target
from fxpipe.verify import verify


def test_parameters_have_no_memory_and_buffers_have_their_values():
    model = built(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model[1].running_var, torch.ones(3))
    assert lacks_memory(model)
    assert not lacks_memory(nn.Linear(2, 3))


def test_what_a_build_does_with_parameters_goes_through():
    def make():
        model = models.Tied()
        nn.init.trunc_normal_(model.embed.weight, std=0.02)
        layers = nn.ModuleList(copy.deepcopy(model) for _ in range(2)).half()
        layers[0].body.requires_grad_(False)
        return layers

    first, second = built(make)
    assert first.head.weight is first.embed.weight
    assert first.head.weight is not second.head.weight
    assert first.head.weight.dtype == torch.float16
    assert not first.body[0].weight.requires_grad


def test_a_parameter_that_no_machine_holds_can_be_built():
    model = built(lambda: nn.Linear(10**6, 10**6))
    assert model.weight.numel() == 10**12


def test_afterwards_models_are_built_as_usual():
    built(models.Chain)
    assert not lacks_memory(models.Chain())


def test_a_buffer_whose_values_are_lost_is_refused():
    model = built(models.Chain)
    model.register_buffer("kept", torch.empty(2, device="meta"))
    assert lacks_memory(model)
    model.register_buffer("lost", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(InputError, match="the buffer 'lost' has no values"):
        lacks_memory(model)


def test_a_build_that_reads_values_is_told_so():
    def make():
        layer = nn.Linear(2, 2)
        return layer if layer.weight.sum().item() > 0 else nn.Linear(3, 3)

    target = Target("t", "t.py", ".", make, lambda rows: (torch.randn(rows, 2),))
    with pytest.raises(TargetError, match=r"make\(\) in t\.py can't be run without memory"):
        target.build_without_memory()


def test_fake_tensors_share_memory_where_real_ones_do_and_go_again():
    model = built(models.Tied)
    before = dict(model.named_parameters())
    with faked(model) as fake, fake.mode:
        assert model.head.weight is model.embed.weight
        assert model.head.weight.device.type == "cpu"
        output = model(torch.zeros(2, 5, dtype=torch.long))
        assert storage_of(output.view(-1)) == storage_of(output)
        assert storage_of(output + 1) != storage_of(output)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_it_is_captured_as_with_memory(kind):
    real, other = captured(kind), captured_bare(kind)
    assert str(other.graph) == str(real.graph)
    assert other.ops == real.ops
    assert other.fingerprint == real.fingerprint
    assert other.checked == "train and eval, by the calls of torch alone"


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_the_package_computes_what_the_model_with_memory_does(kind, tmp_path):
    package = compile_flat(
        built(kind),
        kwargs=MAKERS[kind](8),
        devices="cpu*2",
        microbatches=4,
        captured=captured_bare(kind),
    )
    result = verify(package.write(tmp_path / "out"), target_of(kind), batch=10)
    assert result.equal, result
    assert [d.group for d in result.differences][-1] == "eval(): outputs"


def test_it_is_emitted_as_with_memory():
    def files(model, capture):
        given = MAKERS[models.Tied](8)
        package = compile_flat(
            model, kwargs=given, devices="cpu*2", microbatches=4, captured=capture
        )
        return {name: text for name, text in package.files.items() if name != "plan.json"}

    bare, real = captured_bare(models.Tied), captured(models.Tied)
    assert files(built(models.Tied), bare) == files(models.Tied(), real)


def test_a_graph_that_makes_other_calls_is_not_called_equal():
    with mock.patch("fxpipe.capture.calls.calls_of", lambda run: (run(), [object()])[1]):
        assert capture(built(models.Chain), (torch.randn(8, 6),), {}).checked == "nothing"


def test_nothing_can_be_measured_of_it():
    with pytest.raises(InputError, match=r"built without memory.*analytic:h100"):
        fxpipe.compile(built(models.Chain), (torch.randn(8, 6),), devices=2, microbatches=2)


def test_an_op_that_another_precision_lacks_is_no_news():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 16, 16, dtype=torch.bfloat16))

        def forward(self, x):
            ends = torch.tensor([8, 16], dtype=torch.int32, device=x.device)
            return torch.nn.functional.grouped_mm(x.to(torch.bfloat16), self.weight, offs=ends)

    model, x = built(Grouped), torch.randn(16, 16, dtype=torch.bfloat16)
    with mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "handle") as told:
        assert capture(model, (x,), {}).checked != "nothing"
    told.assert_not_called()
