"""Values whose shape depends on data are as large as the micro-batch that has the most of them."""

import pytest
import torch
from torch import nn

from fxpipe.capture import capture
from fxpipe.passes.linearize import linearize
from fxpipe.passes.profile import profile
from fxpipe.runtime.device_names import parse_devices

WIDTH = 32
INDEX_BYTES, ROW_BYTES = 8, 4 * WIDTH


class Routed(nn.Module):
    """Each token goes to one of two experts."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        routed = torch.zeros_like(tokens)
        for k, expert in enumerate(self.experts):
            (chosen,) = ((tokens[:, 0] > 0) == bool(k)).nonzero(as_tuple=True)
            routed[chosen] = expert(tokens[chosen])
        return (routed * tokens).view(x.shape)


@pytest.fixture
def measured():
    """Of two micro-batches of 80 tokens, of which the second has 70 for the last expert."""
    x = torch.randn(4, 40, WIDTH)
    x[:, :, 0] = -1.0
    x[:2, :10, 0] = x[2:, :35, 0] = 1.0
    captured = capture(Routed(), (x,), {})
    lanes = parse_devices("cpu*2")
    return captured, profile(captured, Routed(), [x], n_microbatches=2, devices=lanes)


def test_a_value_is_as_large_as_in_the_micro_batch_that_has_the_most(measured):
    captured, found = measured
    values = {value.name: value.bytes for value in linearize(captured, found).values}
    sizes = sorted(size for name, size in values.items() if captured.specs[name].of_data)
    of_indices = [60 * INDEX_BYTES, 70 * INDEX_BYTES]
    of_tokens_and_results = [60 * ROW_BYTES] * 2 + [70 * ROW_BYTES] * 2
    assert sizes == of_indices + of_tokens_and_results


def test_so_much_of_it_is_saved(measured):
    _, found = measured
    experts = [cost for name, cost in found.costs.items() if name.startswith("expert")]
    assert [size for cost in experts for _, size in cost.saved] == [60 * ROW_BYTES, 70 * ROW_BYTES]
    writes = [cost for name, cost in found.costs.items() if name.startswith("setitem")]
    assert [size for cost in writes for _, size in cost.saved] == [
        60 * INDEX_BYTES,
        70 * INDEX_BYTES,
    ]
