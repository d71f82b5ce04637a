"""What an op needs besides what is saved: waiting values forward, waiting gradients backward."""

import torch
from torch import nn

from fxpipe.capture import capture
from fxpipe.ir import OpCost
from fxpipe.liveness import workspaces


class Skip(nn.Module):
    """`x + 1` waits until the end, and its gradient from then on."""

    def forward(self, x):
        early = x + 1
        a = early * 2
        b = a * 3
        return b - early


def needed(costs=None):
    captured = capture(Skip(), (torch.randn(8, 4, requires_grad=True),), {})
    ops = list(captured.ops)
    given = {name: OpCost(0.0, 0.0) for name in ops} | (costs or {})
    found = workspaces(captured, given, ops, batch=8)
    return [max(found[name]) // (8 * 4 * 4) for name in ops]


def test_values_and_gradients_that_wait():
    # While b is computed, a and early are there; a loss holds four such as the last op's result,
    # one of them in the room that results have anyway. Backward, while a's gradient is computed,
    # b's and early's are there.
    assert needed() == [1, 2, 2, 3]


def test_what_is_saved_waits_for_nothing():
    size = 8 * 4 * 4
    saving = {"a": OpCost(0.0, 0.0, (("early", size),)), "b": OpCost(0.0, 0.0, (("a", size),))}
    assert needed(saving) == [1, 2, 2, 3]


def test_a_result_that_is_saved_is_not_counted_for_the_loss_as_well():
    size = 8 * 4 * 4
    assert needed({"output": OpCost(0.0, 0.0, (("output", size),))})[-1] == 2


def test_what_an_op_makes_itself():
    size = 8 * 4 * 4
    forward = {"a": OpCost(0.0, 0.0, workspace_bytes=5 * size)}
    backward = {"b": OpCost(0.0, 0.0, backward_bytes=5 * size)}
    assert needed(forward)[1] == 1 + 5
    assert needed(backward)[2] == 2 + 5
