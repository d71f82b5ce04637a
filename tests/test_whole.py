"""The whole graph is timed on one lane beside busy others, and the model is left as it was."""

import threading

import models
import pytest
import torch

from fxpipe.capture import capture
from fxpipe.runtime.stream import parse_devices
from fxpipe.whole import whole_ms


@pytest.mark.parametrize("devices", ["cpu", "cpu*3"])
def test_a_whole_forward_and_backward_take_time_and_leave_no_trace(devices):
    model, x = models.Norms().train(), torch.randn(4, 3, 8, 8)
    captured = capture(model, (x,), {})
    assert all(ms > 0 for ms in whole_ms(captured, [x], parse_devices(devices)))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.bn.num_batches_tracked == 0


def test_every_lane_is_busy():
    seen = set()

    class Spy(torch.nn.Module):
        def forward(self, x):
            seen.add(threading.current_thread().name)
            return x

    model, x = models.Chain(), torch.randn(8, 6)
    captured = capture(model, (x,), {})
    node = next(node for node in captured.graph.nodes if node.op == "call_module")
    spied = {**captured.modules, str(node.target): Spy()}
    object.__setattr__(captured, "modules", spied)
    whole_ms(captured, [x], parse_devices("cpu*2"))
    assert seen == {"fxpipe lane 0", "fxpipe lane 1"}
