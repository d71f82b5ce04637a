"""What can't be cut is one block, in program order."""

import torch
from torch import nn
from torch.nn import functional as F

from fxpipe.capture import capture
from fxpipe.passes.linearize_blocks import blocks_of


def blocks(model, *args):
    """The lines of each block."""
    captured = capture(model, args, {})
    sources = {name: op.source for name, op in captured.ops.items()}
    return [[sources[op].text if sources[op] else op for op in b] for b in blocks_of(captured)]


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

    # The value in between is copied, and read behind.
    written = ["self.n.add_(1)", "y = x * self.n", "self.n.add_(1)"]
    assert blocks(Counts(), torch.randn(4, 6))[0] == written


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


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)


def test_what_asks_for_the_models_dtype_stays_with_what_tells_it():
    class Masked(Linear):
        def forward(self, x, mask):
            x = self.a(x)
            bias = torch.zeros_like(mask, dtype=self.a.weight.dtype)
            bias = bias.masked_fill(mask, -1.0)
            x = x * 2
            return x + bias

    assert blocks(Masked(), torch.randn(4, 6), torch.ones(4, 6, dtype=torch.bool)) == [
        ["x = self.a(x)", "bias = torch.zeros_like(mask, dtype=self.a.weight.dtype)"],
        ["bias = bias.masked_fill(mask, -1.0)"],
        ["x = x * 2"],
        ["return x + bias"],
    ]


def test_a_dtype_is_read_where_it_is_asked_for():
    class Masked(Linear):
        def forward(self, x, mask):
            x = self.a(x)
            y = x * 2
            bias = torch.zeros_like(mask, dtype=y.dtype)
            return x * y + bias

    # What reads it and what takes it are of one line, and never apart.
    assert blocks(Masked(), torch.randn(4, 6), torch.ones(4, 6, dtype=torch.bool)) == [
        ["x = self.a(x)"],
        ["y = x * 2"],
        ["bias = torch.zeros_like(mask, dtype=y.dtype)"] * 2,
        ["return x * y + bias"],
        ["return x * y + bias"],
    ]
