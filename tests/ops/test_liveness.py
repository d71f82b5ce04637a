"""What an op needs besides what is saved: values forward, and gradients that wait backward."""

import torch
from torch import nn

from fxpipe.capture import capture
from fxpipe.ir import LossCost, OpCost
from fxpipe.ops.liveness import workspaces
from fxpipe.ops.variables import held_until

SIZE = 8 * 4 * 4


class Skip(nn.Module):
    """`x + 1` waits until the end, and its gradient from then on."""

    def forward(self, x):
        early = x + 1
        a = early * 2
        b = a * 3
        return b - early


class Plain(nn.Module):
    """One variable, assigned again and again."""

    def forward(self, x):
        x = x + 1
        x = x * 2
        x = x * 3
        return x - 1


class Nested(nn.Module):
    """Its layer's variables are gone when the layer returns."""

    def __init__(self):
        super().__init__()
        self.layer = Skip()

    def forward(self, x):
        a = self.layer(x)
        return a * 2 - 1


class Joined(nn.Module):
    """The gradients of both parts are views of the whole's, which waits for the earlier one."""

    def forward(self, x):
        early = x + 1
        a = early * 2
        b = a * 3
        return torch.cat([early, b]) * 4


class Folded(nn.Module):
    """What is joined within a longer line is there while the whole is read."""

    def forward(self, x):
        a = x + 1
        b = torch.cat([a, x]) * 2 * 3
        return b - 1


class Expanded(nn.Module):
    """A view of its value looks three times as large, and has a gradient that is."""

    def forward(self, x):
        a = x + 1
        b = a.expand(3, -1, -1) * 2
        return b - 1


class InPlace(nn.Module):
    """Its first value is written in place."""

    def forward(self, x):
        a = x * 2
        b = a.sigmoid_()
        c = b * 3
        return c - 1


class Masked(nn.Module):
    """Its layer, and a value of its own."""

    def __init__(self):
        super().__init__()
        self.layer = Skip()

    def forward(self, x):
        mask = x * 5
        return self.layer(x) * mask


class Passed(nn.Module):
    """What it passes to a function of its own has no variable there, and has one in a stage."""

    def forward(self, x):
        x = self.scaled(x + 1)
        return x - 1

    def scaled(self, *given):
        a = given[0] * 2
        b = a * 3
        return b


def value_bytes(captured):
    """Of each value, as in the whole batch."""
    sizes = captured.sizes | {"batch": captured.batch}
    return {name: spec.bytes(sizes) for name, spec in captured.specs.items()}


def needed(costs=None, model=Skip, places=None):
    """By op, forward and backward, in tensors like the input; in another order, if it is given.

    The last forward has the loss behind it.
    """
    captured = capture(model(), (torch.randn(8, 4, requires_grad=True),), {})
    ops = list(captured.ops)
    ops = ops if places is None else [ops[k] for k in places]
    given = {name: OpCost(0.0, 0.0) for name in ops} | (costs or {})
    found, loss_bytes = workspaces(captured, given, ops, value_bytes(captured))
    *both, (forward, backward) = (found[name][:2] for name in ops)
    both.append((max(forward, loss_bytes), backward))
    return [(forward // SIZE, backward // SIZE) for forward, backward in both]


def test_values_and_gradients_that_wait():
    # While b is computed, a and early are there, and while the result is, all three. Backward,
    # while a's gradient is computed, b's and early's are there.
    assert needed() == [(0, 1), (1, 2), (2, 2), (3, 0)]


def test_a_gradient_whose_views_are_gradients_waits_for_the_last_of_them():
    # Of early and b, twice as long as the input; beside it, on the way back from b, one of a.
    backward = [of_backward for _, of_backward in needed(model=Joined)]
    assert backward == [1, 1 + 2, 2, 2, 0]


def test_a_value_is_held_by_its_variable_until_that_is_assigned_anew_or_its_function_ends():
    # A loss holds four tensors like the last op's result, one of them in the room for results.
    assert needed(model=Plain) == [(0, 1), (1, 1), (1, 1), (3, 0)]
    assert needed(model=Nested)[-2:] == [(1, 1), (3, 0)]


def test_an_op_of_the_caller_between_those_of_a_function_does_not_end_it():
    # Before the layer's last op are early, a, the mask and b; behind it the mask and the result.
    forward = [forward for forward, _ in needed(model=Masked, places=[1, 2, 0, 3, 4, 5])]
    assert forward == [0, 1, 2, 3, 4, 3]


def test_what_another_line_reads_is_held_by_a_variable():
    assert [forward for forward, _ in needed(model=Passed)] == [0, 1, 1 + 1, 3]


def test_what_modules_of_torch_compute_may_be_held_by_a_variable():
    # They have no line of the user's, and a stage breaks a line that is too long.
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    captured = capture(layer, (torch.randn(4, 3, 8),), {})
    ops = list(captured.ops)
    held = held_until(captured, ops)
    assert ops.index("linear2") < held["linear2"] == len(ops) - 1


def test_what_is_joined_is_held_while_its_line_reads_the_whole():
    # The whole is twice as long as a part.
    assert [forward for forward, _ in needed(model=Folded)] == [0, 1, 1 + 2, 2, 6]


def test_an_expanded_view_has_no_more_memory_and_its_gradient_has():
    # b's gradient is three times the input's size, as is that of the view that it reads.
    (_, of_a), (_, of_view), *_ = found = needed(model=Expanded)
    assert [forward for forward, _ in found[:3]] == [0, 1, 1]
    assert (of_a, of_view) == (3, 3)


def test_the_gradient_of_what_is_written_in_place_is_that_of_what_is_read():
    captured = capture(InPlace(), (torch.randn(8, 4, requires_grad=True),), {})
    costs = {name: OpCost(0.0, 0.0) for name in captured.ops}
    found, _ = workspaces(captured, costs, [*captured.ops], value_bytes(captured))
    assert [found[name].returning for name in "abc"] == [{"b"}, {"b"}, {"c"}]


def test_what_is_saved_waits_for_nothing():
    saving = {"a": OpCost(0.0, 0.0, (("early", SIZE),)), "b": OpCost(0.0, 0.0, (("a", SIZE),))}
    assert needed(saving) == [(0, 1), (0, 2), (0, 2), (3, 0)]


def test_a_result_that_is_saved_is_not_counted_for_the_loss_as_well():
    saving = {"output": OpCost(0.0, 0.0, (("output", SIZE),))}
    assert needed(saving, Plain)[-1] == (2, 0)


def test_what_an_op_makes_itself():
    forward = {"a": OpCost(0.0, 0.0, workspace_bytes=5 * SIZE)}
    backward = {"b": OpCost(0.0, 0.0, backward_bytes=5 * SIZE)}
    assert needed(forward)[1] == (1 + 5, 2)
    assert needed(backward)[2] == (2, 2 + 5)


def test_what_a_loss_leaves_unused_is_there_beside_what_it_takes_and_has_no_gradient():
    captured = capture(Plain(), (torch.randn(8, 4, requires_grad=True),), {})
    (output,) = captured.outputs
    costs = {name: OpCost(0.0, 0.0) for name in captured.ops}

    def loss_bytes(*unused):
        loss = LossCost(0.0, 5 * SIZE, unused)
        return workspaces(captured, costs, [*captured.ops], value_bytes(captured), loss)[1]

    assert loss_bytes() == 4 * SIZE  # of its five, the gradient's has room of its own
    assert loss_bytes(output) == 6 * SIZE
