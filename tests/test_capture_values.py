"""Captured ops: none without effect, none twice, each called as a person would call it."""

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxpipe.capture import capture


def names(forward, *args):
    """The values of a model with this `forward`, in order."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = nn.Linear(6, 6)
            self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    Model.forward = forward
    return list(capture(Model(), args or (torch.randn(4, 6),), {}).ops)


def kept(forward, x):
    class Model(nn.Module):
        pass

    Model.forward = forward
    graph = capture(Model(), (x,), {}).graph
    return [node.target for node in graph.nodes if node.op.startswith("call_")]


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: (x * 1).relu(),
        lambda self, x: (1.0 * x - 0).relu(),
        lambda self, x: (x / 1).relu(),
        lambda self, x: x[:, 0:].relu(),
        lambda self, x: x.view(-1, 6).relu(),
        lambda self, x: x.expand(x.size(0), 6).relu(),
        lambda self, x: F.dropout(x, 0.0, self.training).relu(),
        lambda self, x: torch.broadcast_tensors(x, torch.zeros(6))[0].relu(),
    ],
)
def test_what_changes_nothing_is_left_out(forward):
    assert kept(forward, torch.randn(4, 6)) == ["relu"]


def test_adding_zero_is_left_out_of_whole_numbers_only():
    plus = lambda self, x: (x + 0).abs()  # noqa: E731
    assert kept(plus, torch.arange(4)) == ["abs"]
    assert operator.add in kept(plus, torch.randn(4))  # -0.0 + 0 is 0.0


def test_a_value_is_named_after_nothing_that_was_left_out_unless_the_user_did():
    def forward(self, x):
        mean, scale = torch.broadcast_tensors(x.cos(), x.exp())
        return (mean * scale).relu() - torch.broadcast_tensors(x.sin(), x)[0]

    assert names(forward) == ["mean", "scale", "product", "relu", "sin", "output"]


def test_what_is_written_later_is_a_value_of_its_own():
    def forward(self, x):
        y = x * 1
        y += 1
        return y * x

    assert kept(forward, torch.randn(4, 6)).count(operator.mul) == 2


def test_equal_indices_are_made_once_random_and_written_ones_each_time():
    def forward(self, x):
        a = torch.arange(6)
        b = torch.arange(6)
        c = torch.randint(6, (6,))
        d = torch.randint(6, (6,))
        e = torch.zeros(6, dtype=torch.long)
        f = torch.zeros(6, dtype=torch.long)
        e += 1
        return x[:, a] + x[:, b] + x[:, c] + x[:, d] + x[:, e] + x[:, f]

    targets = kept(forward, torch.randn(4, 6))
    assert [targets.count(t) for t in (torch.arange, torch.randint, torch.zeros)] == [1, 2, 2]


def half(x):
    y = x.chunk(2, dim=-1)
    return torch.cat((-y[1], y[0]), dim=-1)


def test_ops_of_one_statement_stand_together():
    def forward(self, x):
        a = x * 2
        embedded = (x * a) + (half(x) * a)
        return embedded

    assert names(forward)[-3:] == ["product", "product_2", "embedded"]


def test_values_without_a_variable_are_called_after_who_made_them():
    def forward(self, x):
        query = self.q_proj(x).view(-1, 2, 3).transpose(1, 2)
        outputs = []
        for layer in self.layers:
            outputs.append(layer(x * 2))
        total = half(x).exp() + outputs[0] * outputs[1]
        return total.sum() + query

    found = names(forward)
    assert found[:3] == ["q_proj", "q_proj_2", "query"]
    assert {"output", "output_2", "half", "exp", "total"} <= set(found)
    assert not any("getitem" in name or "mul" in name for name in found)


def test_a_statement_of_several_lines_is_one():
    def forward(self, x):
        return (
            self.q_proj(x)
            .relu()
            .mul(2)
        )  # fmt: skip

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = nn.Linear(6, 6)

    Model.forward = forward
    ops = capture(Model(), (torch.randn(4, 6),), {}).ops.values()
    assert {op.source.text for op in ops} == {"return ("}


def test_a_value_may_have_the_name_of_one_that_was_left_out():
    def forward(self, x):
        x = x.expand_as(x.sin())
        return x.cos().exp().sin().tan()

    assert names(forward) == ["cos", "exp", "sin", "output"]


def test_a_variable_outlives_an_op_on_it_that_was_left_out():
    def forward(self, x):
        mask = x * 3
        y = self.q_proj(x)
        y = y.view(x.shape)
        return y * mask.view(y.shape)

    assert names(forward) == ["mask", "y", "output"]


def test_a_variable_that_a_comprehension_reads_names_what_is_assigned_to_it():
    def forward(self, x):
        h = self.q_proj(x)
        h = h * 2
        parts = [layer(h) for layer in self.layers]
        h = h + parts[0]
        return h.exp() * parts[1]

    assert names(forward)[:2] == ["h", "h_2"]
    assert "h_3" in names(forward)


def test_a_sequential_names_nothing():
    class Embedder(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 6))

        def forward(self, t):
            return self.mlp(t)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedder = Embedder()
            self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU())

        def forward(self, x, t):
            emb = self.embedder(t)
            features = self.body(x)
            return emb * features

    ops = list(capture(Model(), (torch.randn(4, 6), torch.randn(4, 6)), {}).ops)
    assert ops == ["x_2", "x_3", "emb", "x_4", "features", "output"]
