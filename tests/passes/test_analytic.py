"""Analytic costs: from operations and bytes, on a device that need not be there."""

import logging
from unittest import mock

import models
import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.costs.devices import DEVICES, device_named
from fxpipe.costs.roofline import Roofline
from fxpipe.errors import DeviceError, InputError
from fxpipe.memory import without_memory
from fxpipe.passes.analytic import analytic

H100 = DEVICES["h100"]


def worked_out(model, x, m=2, device="analytic:h100"):
    captured = capture(model, (x,), {})
    return captured, analytic(captured, model, [x], n_microbatches=m, device=device)


def ms(run, *given, device=H100):
    return Roofline(device)(lambda values: run(*values), lambda: given)


def test_a_large_product_takes_its_operations_and_a_sum_its_bytes():
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    operations, peak = 2 * 4096**3, 0.7 * 989.5e9
    assert ms(torch.mm, a, a) == pytest.approx(H100.launch_ms + operations / peak)
    n_bytes, speed = 3 * 2 * 4096**2, 0.8 * 3350e6
    assert ms(torch.add, a, a) == pytest.approx(H100.launch_ms + n_bytes / speed)


def test_a_view_takes_nothing_and_a_lookup_what_it_finds():
    table = torch.empty(10**6, 64, device="meta")
    assert ms(lambda t: t.view(-1).unsqueeze(0), table) == 0
    tokens = torch.empty(8, dtype=torch.long, device="meta")
    assert ms(nn.functional.embedding, tokens, table) < 2 * H100.launch_ms


def test_attention_counts_on_a_cpu_as_elsewhere():
    q = torch.empty(1, 8, 512, 64)
    attention = ms(nn.functional.scaled_dot_product_attention, q, q, q)
    operations = 2 * 2 * 8 * 512 * 512 * 64
    assert attention == pytest.approx(H100.launch_ms + operations / (0.7 * 67e9))


@pytest.mark.parametrize("lacking", [False, True])
def test_every_op_has_a_cost_in_both_directions(lacking):
    def make():
        return models.Norms()

    if lacking:
        with without_memory():
            model = make()
    else:
        model = make()
    captured, found = worked_out(model, torch.randn(8, 3, 8, 8))
    assert found.costs.keys() == captured.ops.keys()
    conv = next(name for name, op in captured.ops.items() if op.module == "conv")
    assert found.costs[conv].forward_ms > 0
    assert found.costs[conv].backward_ms > found.costs[conv].forward_ms
    assert found.device == "NVIDIA H100 SXM"
    assert found.origin == "analytic:h100"
    assert found.capacity_bytes == 80 * 10**9


def test_bytes_for_backward_are_those_that_are_measured():
    from test_profile import really_saved

    for model, x in [
        (models.Norms(), torch.randn(8, 3, 8, 8)),
        (models.Skip(), torch.randn(8, 6)),
        (models.Chain(), torch.randn(8, 6)),
    ]:
        _, found = worked_out(model, x, m=1)
        storages = {name: size for cost in found.costs.values() for name, size in cost.saved}
        assert sum(storages.values()) == really_saved(model, x)


def test_the_model_is_left_as_it_was():
    model = models.Norms().eval()
    worked_out(model, torch.randn(8, 3, 8, 8))
    assert not model.training
    assert model.bn.num_batches_tracked == 0
    assert type(model.bn.weight) is nn.Parameter


def test_a_model_with_memory_is_compiled_for_another_device():
    package = fxpipe.compile(
        models.Chain(),
        (torch.randn(8, 6),),
        devices="cpu*2",
        microbatches=2,
        profile="analytic:a100",
    )
    assert package.manifest.profile == "analytic:a100"
    assert package.manifest.checked == "train and eval"


@pytest.mark.parametrize("text", ["analytic:h1000", "analytic:", "h100"])
def test_an_unknown_device_is_told_the_known_ones(text):
    with pytest.raises(DeviceError, match=r"analytic:v100, analytic:a100, .*analytic:cpu"):
        device_named(text)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_figure_has_its_source(device):
    assert device.source
    assert device.operations_per_ms(torch.float16) >= device.operations_per_ms(torch.float32)
    assert device.operations_per_ms(torch.float32) >= device.operations_per_ms(torch.float64)


def test_the_backward_of_an_op_that_writes_its_input_costs_what_another_does():
    costs = []
    for inplace in (False, True):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace))
        captured, profile = worked_out(model, torch.randn(8, 64))
        _, relu = captured.ops
        costs.append((profile.costs[relu].backward_ms, profile.costs[relu].backward_bytes))
    assert costs[0] == costs[1]
    assert costs[1][1] == 4 * 64 * 4


def test_an_op_that_looks_at_numbers_is_told_to_be_measured():
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(6, 6)

        def forward(self, x):
            x = self.scale(x)
            return x + x[torch.nonzero(x[:, 0] > 0)].sum()

    says = r"looks at numbers \(aten\.nonzero.*h100 does not.*, at .*torch\.nonzero.*--profile"
    with pytest.raises(InputError, match=says):
        worked_out(Chooses(), torch.randn(8, 6))


def test_an_op_that_torch_can_not_run_by_shapes_is_told_to_be_measured():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 8, 8, dtype=torch.bfloat16))

        def forward(self, x):
            ends = torch.full((2,), len(x), dtype=torch.int32)
            return nn.functional.grouped_mm(x.to(self.weight.dtype), self.weight, offs=ends)

    model, given = Grouped(), [torch.randn(8, 8)]
    captured = capture(model, given, {})
    model.float()  # which the fake version refuses, though the op takes it
    says = r"by shapes alone, as analytic:h100 does, at .*grouped_mm.*--profile.*\n.*of BF16 type"
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with mock.patch.object(logger, "handle") as told, pytest.raises(InputError, match=says):
        analytic(captured, model, given, n_microbatches=2, device="analytic:h100")
    told.assert_not_called()
