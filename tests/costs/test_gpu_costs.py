"""On a GPU, costs are the device's times; on parts of one, those beside busy others."""

import time

import models
import pytest
import torch

from fxpipe.capture import capture
from fxpipe.costs.stopwatch import StopWatch
from fxpipe.passes.profile import profile
from fxpipe.runtime.device_names import parse_devices

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
_MS = 2_000_000  # cycles, of a clock of 1 to 2 GHz


def test_neither_the_host_nor_the_first_run_counts():
    first = [1.0]

    def run(_):
        time.sleep(first.pop() if first else 0.01)
        torch.cuda._sleep(_MS)

    assert 0.5 < StopWatch(torch.device("cuda", 0))(run, lambda: None) < 4


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0/2"])
def test_a_profile_is_of_the_device(devices):
    if "/" in devices:
        pytest.importorskip("cuda.bindings")
    model, x = models.Norms().train(), torch.randn(64, 3, 32, 32)
    found = profile(
        capture(model, (x,), {}), model, [x], n_microbatches=2, devices=parse_devices(devices)
    )
    ops = found.costs.values()
    assert all(op.forward_ms > 0 for op in ops)
    first = next(iter(ops))  # its input needs no gradient
    assert 0 < first.weight_gradient_ms == pytest.approx(first.backward_ms)
    assert sum(op.forward_ms + op.backward_ms for op in ops) < 50
    assert min(found.launch.forward_ms, found.launch.backward_ms, found.launch.action_ms) > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.bn.num_batches_tracked == 0
    assert found.library_bytes >= 2**20  # its linear layer is a matrix product, by cuBLAS
