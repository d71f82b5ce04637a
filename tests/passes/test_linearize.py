"""Linearize: what can't be cut is one block, in program order; values know their readers."""

import dataclasses

import models
import torch
from flat import flat_profile
from torch import nn
from torch.nn import functional as F

from fxpipe.capture import capture
from fxpipe.ir import LossCost, OpCost
from fxpipe.ops.interpret import HUNK
from fxpipe.passes.linearize import linearize


def blocks(model, *args, **kwargs):
    captured = capture(model, args, kwargs)
    chain = linearize(captured, flat_profile(captured, 1))
    sources = {name: op.source for name, op in captured.ops.items()}
    return [[sources[op].text if sources[op] else op for op in b.ops] for b in chain.blocks]


def chain_of(model, *args):
    captured = capture(model, args, {})
    return linearize(captured, flat_profile(captured, 1))


def test_a_plain_chain_is_a_block_an_op():
    chain = chain_of(models.Chain(), torch.randn(4, 6))
    assert [len(block.ops) for block in chain.blocks] == [1, 1, 1, 1]
    assert [len(chain.crossing(k)) for k in range(4)] == [1, 1, 1, 0]


def test_a_value_written_in_place_stays_with_its_writer():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 2
            z = y + 1
            y.mul_(3)
            return y * z

    assert blocks(InPlace(), torch.randn(4, 6)) == [
        ["y = x * 2", "z = y + 1", "y.mul_(3)"],
        ["return y * z"],
    ]


def test_a_view_counts_as_the_value_it_is_of():
    class View(nn.Module):
        def forward(self, x):
            y = x * 2
            y.view(-1)[0] = 1
            return y + 1

    assert len(blocks(View(), torch.randn(4, 6))) == 2


def test_an_input_written_in_place_is_copied_and_the_copy_written_in_one_block():
    class Overwrites(nn.Module):
        def forward(self, x):
            y = x * 2
            x.add_(1)
            return y + 1, x * 3

    # The copy, what reads it before, and the write; behind it anyone may read it.
    assert [len(block) for block in blocks(Overwrites(), torch.randn(4, 6))] == [3, 1, 1]


def test_a_tuple_stays_with_those_who_unpack_it():
    class Splits(nn.Module):
        def forward(self, x):
            a, b = x.split(3, dim=1)
            return a * b

    assert [len(block) for block in blocks(Splits(), torch.randn(4, 6))] == [3, 1]


def test_regions_may_be_divided():
    class Regions(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                y = x * 2
                y = y + 1
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = y @ y.T[:, :1]
            return x * y, z

    assert [len(block) for block in blocks(Regions(), torch.randn(4, 6))] == [1] * 6


def test_random_ops_keep_their_order():
    class TwoDropouts(nn.Module):
        def forward(self, x):
            y = x * 2
            a = F.dropout(x)
            b = F.dropout(y)
            y.mul_(3)
            return a + b + y

    assert blocks(TwoDropouts(), torch.randn(4, 6))[:2] == [
        ["a = F.dropout(x)"],
        ["y = x * 2", "b = F.dropout(y)", "y.mul_(3)"],
    ]


def test_a_buffer_written_in_two_places_holds_them_together():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x):
            self.n.add_(1)
            x = x * 2
            y = x * self.n
            self.n.add_(1)
            return y

    assert len(blocks(Counts(), torch.randn(4, 6))) <= 2


def test_a_block_knows_the_buffers_that_its_ops_write():
    norm = nn.BatchNorm1d(6)
    norm.register_buffer("unwritten", torch.zeros(100))
    chain = chain_of(nn.Sequential(nn.Linear(6, 6), norm), torch.randn(4, 6))
    # The count of batches, then the running mean and variance.
    assert [block.written_bytes for block in chain.blocks] == [0, 8, 2 * 6 * 4]


def test_a_buffer_is_not_taken_for_an_op_of_the_same_name():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("std", torch.ones(6))

        def forward(self, x):
            self.std.lerp_(x.std(0) + 1, 0.1)
            y = x * 2
            return y / self.std

    write, read = "self.std.lerp_(x.std(0) + 1, 0.1)", "return y / self.std"
    together = [{write, read} & {*block} for block in blocks(Scaled(), torch.randn(4, 6))]
    assert {write, read} in together


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


def test_what_is_made_of_nothing_is_made_where_it_is_read():
    class LateMask(nn.Module):
        def forward(self, x):
            mask = torch.ones(6)
            x = x * 2
            x = x + 1
            return x * mask

    assert blocks(LateMask(), torch.randn(4, 6)) == [
        ["x = x * 2"],
        ["x = x + 1"],
        ["mask = torch.ones(6)", "return x * mask"],
    ]


def test_what_asks_for_the_models_dtype_stays_with_what_tells_it():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x, mask):
            x = self.a(x)
            bias = torch.zeros_like(mask, dtype=x.dtype)
            bias = bias.masked_fill(mask, -1.0)
            x = x * 2
            return x + bias

    assert blocks(Masked(), torch.randn(4, 6), torch.ones(4, 6, dtype=torch.bool)) == [
        ["x = self.a(x)"],
        ["x = x * 2"],
        [
            "bias = torch.zeros_like(mask, dtype=x.dtype)",
            "bias = bias.masked_fill(mask, -1.0)",
            "return x + bias",
        ],
    ]


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


def test_a_gradient_that_the_caller_gives_does_not_wait_twice():
    captured = capture(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)), (torch.randn(4, 6),), {})
    flat = flat_profile(captured, 1)
    first, last = captured.ops
    sizes = {first: 4 * 6 * 4, last: 4 * 5 * 4}
    costs = {name: OpCost(1.0, 2.0, arriving_bytes=size) for name, size in sizes.items()}
    found = linearize(captured, dataclasses.replace(flat, costs=costs)).blocks
    assert [block.arriving_bytes for block in found] == [sizes[first], 0]
