"""Linearize: blocks have their ops' costs; values know their readers."""

import dataclasses

import models
import torch
from flat import flat_profile
from torch import nn

from fxpipe.capture import capture
from fxpipe.ir import LossCost, OpCost
from fxpipe.ops.interpret import HUNK
from fxpipe.passes.linearize import linearize
from fxpipe.passes.partition_stages import stage_costs


def chain_of(model, *args):
    captured = capture(model, args, {})
    return linearize(captured, flat_profile(captured, 1))


def test_a_plain_chain_is_a_block_an_op():
    chain = chain_of(models.Chain(), torch.randn(4, 6))
    assert [len(block.ops) for block in chain.blocks] == [1, 1, 1, 1]
    assert [len(chain.crossing(k)) for k in range(4)] == [1, 1, 1, 0]


def test_a_block_knows_the_buffers_that_its_ops_write():
    norm = nn.BatchNorm1d(6)
    norm.register_buffer("unwritten", torch.zeros(100))
    chain = chain_of(nn.Sequential(nn.Linear(6, 6), norm), torch.randn(4, 6))
    # The count of batches, then the running mean and variance.
    assert [block.written_bytes for block in chain.blocks] == [0, 8, 2 * 6 * 4]


def test_values_know_where_they_are_read():
    chain = chain_of(models.Skip(), torch.randn(4, 6))
    skip = next(v for v in chain.values if len(v.consumers) == 2)
    assert (skip.producer, skip.consumers, skip.bytes, skip.gradient) == (
        0,
        (1, 5),
        4 * 6 * 4,
        True,
    )
    given = next(v for v in chain.values if v.producer == -1)
    assert given.consumers == (0,)


def test_tied_parameters_are_one_storage():
    chain = chain_of(models.Tied(), torch.randint(11, (4, 5)))
    assert chain.blocks[0].parameters == (("embed.weight", 11 * 6 * 4),)
    assert chain.blocks[-1].parameters == (("embed.weight", 11 * 6 * 4),)


def test_a_cut_divides_the_modules_whose_forward_goes_on_behind_it():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)

        def forward(self, x):
            return self.b(self.a(x))

    chain = chain_of(nn.Sequential(Inner(), Inner()), torch.randn(4, 6))
    assert chain.divides == (1, 0, 1, 0)


def test_an_op_needs_other_memory_for_inputs_and_for_weights():
    class Middle(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6, bias=False)

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    captured = capture(Middle(), (torch.randn(4, 6),), {})
    flat = flat_profile(captured, 1)
    first, tanh, second = captured.ops
    size = 4 * 6 * 4
    costs = {
        first: OpCost(1.0, 2.0, weight_gradient_ms=2.0, backward_bytes=200),
        tanh: OpCost(1.0, 2.0, backward_bytes=300),
        second: OpCost(1.0, 2.0, weight_gradient_ms=1.0, backward_bytes=999, arriving_bytes=size),
    }
    found = linearize(captured, dataclasses.replace(flat, costs=costs)).blocks
    # With no input that wants a gradient, the first's weights are all of its backward; the second's
    # are 6 x 6 numbers, and so is their gradient. What is passed on waits in between.
    needed = [(b.input_workspace_bytes, b.weight_workspace_bytes) for b in found]
    assert needed == [(0, 200 + size), (300 + size, 0), (999 - 6 * 6 * 4, 999)]


def test_what_is_added_to_a_gradient_that_is_there_needs_no_memory():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.shared = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

        def forward(self, x):
            return self.shared(self.shared(self.layer(x)))

    captured = capture(Twice(), (torch.randn(4, 6, requires_grad=True),), {})
    nodes = {node.name: node for node in captured.graph.nodes}
    for name in [*captured.ops][1:]:
        nodes[name].meta[HUNK] = 0  # one block
    size = 6 * 6 * 4
    cost = OpCost(1.0, 2.0, backward_bytes=1000, added_bytes=size, arriving_bytes=1)
    costs = dict.fromkeys(captured.ops, cost)
    profile = dataclasses.replace(flat_profile(captured, 1), costs=costs)
    own, both = linearize(captured, profile).blocks
    returning = 4 * 6 * 4  # the gradient of the op's result
    assert own.backward_workspace_bytes == 1000 - size + returning
    assert own.weight_workspace_bytes == 1000 - size
    # Those of a weight that is read twice are made, and added up.
    assert both.backward_workspace_bytes == 1000 + returning


def test_the_loss_is_part_of_the_last_backward_alone():
    captured = capture(models.Chain(), (torch.randn(4, 6),), {})
    profile = flat_profile(captured, 1)
    without = linearize(captured, profile)
    output = 4 * 6 * 4  # which the last op saves, and whose gradient has room of its own
    peak = 10**6 + 2 * output
    found = linearize(captured, dataclasses.replace(profile, loss=LossCost(5.0, peak)))
    assert [block.forward_ms for block in found.blocks] == [b.forward_ms for b in without.blocks]
    added = [
        a.backward_ms - b.backward_ms for a, b in zip(found.blocks, without.blocks, strict=True)
    ]
    assert added == [0.0, 0.0, 0.0, 5.0]
    assert found.blocks[-1].weight_gradient_ms == without.blocks[-1].weight_gradient_ms
    assert found.blocks[-1].loss_bytes == 10**6 > without.blocks[-1].loss_bytes
    last = {block.forward_workspace_bytes for block in (found.blocks[-1], without.blocks[-1])}
    assert len(last) == 1
    assert found.blocks[:-1] == without.blocks[:-1]


def test_a_last_stage_that_only_views_what_it_receives_has_the_loss_there():
    chain = chain_of(nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3))), torch.randn(8, 4))
    (_, last), _ = stage_costs(chain, (1,))
    assert last.loss_bytes >= chain.blocks[-1].loss_bytes > 0
    assert last.backward_workspace_bytes > 0  # no stage of a bare chain, which need nothing


def test_an_output_that_the_loss_leaves_unused_goes_to_the_caller_and_no_gradient_comes_back():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 5)

        def forward(self, x):
            hidden = self.first(x)
            return self.second(hidden), hidden

    captured = capture(Both(), (torch.randn(4, 6),), {})
    answer, hidden = captured.outputs
    profile = dataclasses.replace(
        flat_profile(captured, 1), loss=LossCost(1.0, 0, unused=(hidden,))
    )
    found = [value for value in linearize(captured, profile).values if value.producer >= 0]
    assert [(v.name, v.consumers, v.gradient) for v in found] == [
        (hidden, (1,), True),
        (f"{hidden}/returned", (2,), False),
        (answer, (2,), True),
    ]


def test_a_gradient_that_the_caller_gives_does_not_wait_twice():
    captured = capture(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)), (torch.randn(4, 6),), {})
    flat = flat_profile(captured, 1)
    first, last = captured.ops
    sizes = {first: 4 * 6 * 4, last: 4 * 5 * 4}
    costs = {name: OpCost(1.0, 2.0, arriving_bytes=size) for name, size in sizes.items()}
    found = linearize(captured, dataclasses.replace(flat, costs=costs)).blocks
    assert [block.arriving_bytes for block in found] == [sizes[first], 0]
