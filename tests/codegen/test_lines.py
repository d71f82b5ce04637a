"""Lines: an op is written as a person would write it."""

import operator

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from fxpipe.codegen.lines import Writer
from fxpipe.errors import CaptureError
from fxpipe.ops.interpret import MODE

graph = fx.Graph()
x, y = graph.placeholder("x"), graph.placeholder("y")
writer = Writer(lambda node: node.name, lambda name: f"self.{name}")


def call(target, *args, **kwargs):
    return graph.call_function(target, args, kwargs)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (call(operator.add, x, 1), "x + 1"),
        (call(operator.sub, 1.5, x), "1.5 - x"),
        (call(operator.mul, x, -2), "x * (-2)"),
        (call(operator.neg, x), "-x"),
        (call(operator.abs, x), "abs(x)"),
        (call(torch.sym_float, x), "float(x)"),
        (call(torch.sym_max, x, 4), "max(x, 4)"),
        (call(torch.sym_sqrt, x), "math.sqrt(x)"),
        (call(torch._sym_log2, x), "math.log2(x)"),
        (graph.call_method("__round__", (x, 2)), "round(x, 2)"),
        (call(operator.and_, x, y), "x & y"),
        (call(operator.getitem, x, 0), "x[0]"),
        (call(operator.getitem, x, (slice(None), None, slice(1, None, 2))), "x[:, None, 1::2]"),
        (call(operator.getitem, x, (Ellipsis, slice(None, -1))), "x[..., :-1]"),
        (call(operator.getitem, x, y), "x[y]"),
        (call(torch.cat, [x, y], dim=1), "torch.cat([x, y], dim=1)"),
        (
            call(torch.zeros, (2, 3), device=torch.device("cpu")),
            "torch.zeros((2, 3), device=device)",
        ),
        (call(torch.full, (2,), float("-inf")), 'torch.full((2,), float("-inf"))'),
        (call(torch.arange, 3, dtype=torch.int64), "torch.arange(3, dtype=torch.int64)"),
        (call(torch._C._nn.linear, x, y, None), "F.linear(x, y)"),
        (call(torch._C._nn.pad, x, (0, 1), "constant", None), "F.pad(x, (0, 1))"),
        (call(F.dropout, x, 0.5, True, False), "F.dropout(x)"),
        (call(F.dropout, x, 0.1, y, False), "F.dropout(x, p=0.1, training=y)"),
        (call(F.grouped_mm, x, y, offs=y), "F.grouped_mm(x, y, offs=y)"),
        (call(F.embedding, x, y, None, None, 2.0, False, False), "F.embedding(x, y)"),
        (call(F.layer_norm, x, (4,), y, None, 1e-05), "F.layer_norm(x, (4,), y)"),
        (call(torch._weight_norm, x, y, 0), "torch._weight_norm(x, y, 0)"),
        (call(torch.ops.aten.relu.default, x), "torch.ops.aten.relu.default(x)"),
        (graph.call_method("view", (x, -1, 4)), "x.view(-1, 4)"),
        (graph.call_method("view", (x, (-1, 4))), "x.view(-1, 4)"),
        (graph.call_method("sum", (x,), {"dim": 1, "keepdim": False}), "x.sum(dim=1)"),
        (
            call(F.scaled_dot_product_attention, x, x, y, attn_mask=None, is_causal=False),
            "F.scaled_dot_product_attention(x, x, y)",
        ),
        (graph.call_method("to", (x,), {"dtype": torch.float16}), "x.to(dtype=torch.float16)"),
        (graph.call_module("a.b", (x,)), "self.a.b(x)"),
    ],
)
def test_expressions(node, text):
    assert writer.expression(node) == text


def test_expressions_nest_with_parentheses_where_they_are_needed():
    nested = Writer(lambda node: "a + b" if node is x else node.name, str)
    assert nested.expression(call(operator.mul, x, y)) == "(a + b) * y"
    assert nested.expression(graph.call_method("sum", (x,))) == "(a + b).sum()"
    assert nested.expression(call(torch.relu, x)) == "torch.relu(a + b)"


def test_a_module_gets_nothing_for_what_only_the_other_mode_makes():
    made, other, both = (call(torch.relu, x) for _ in range(3))
    made.meta[MODE], other.meta[MODE] = True, False
    given = f"{made.name} if self.training else None, {other.name} if not self.training else None"
    block = graph.call_module("block", (made, other, both))
    assert writer.expression(block) == f"self.block({given}, {both.name})"
    in_training = graph.call_module("block", (made,))
    in_training.meta[MODE] = True
    assert writer.expression(in_training) == f"self.block({made.name})"


@pytest.mark.parametrize(
    ("node", "variable", "lines"),
    [
        (call(operator.iadd, x, y), "x", "x += y"),
        (call(operator.iadd, x, y), "z", "x += y\nz = x"),
        (call(operator.setitem, x, (slice(None), 0), 1), "_", "x[:, 0] = 1"),
        (call(torch.relu, x), "z", "z = torch.relu(x)"),
    ],
)
def test_statements(node, variable, lines):
    assert writer.statement(node, variable, wanted=True) == lines


def test_a_result_that_nobody_reads_gets_no_variable():
    assert writer.statement(graph.call_method("add_", (x, 1)), "z", wanted=False) == "x.add_(1)"


def test_what_has_no_text_is_refused():
    with pytest.raises(CaptureError, match="can't be written as code"):
        writer.expression(call(torch.relu, object()))
    with pytest.raises(CaptureError, match="no public name"):
        writer.expression(call(lambda a: a, x))


def test_names_of_the_model_are_text_not_code():
    evil = nn.Module()
    evil.add_module('a"; import os; "', nn.Linear(1, 1))
    from fxpipe.codegen.names import assignment, path, plain

    assert path('a"; import os; "', {}) == """getattr(self, 'a"; import os; "')"""
    assert assignment("self", "class", "nn.Module()") == "setattr(self, 'class', nn.Module())"
    assert path("h.0.attn", {"h": "dict"}) == 'self.h["0"].attn'
    assert plain('x\n"""; import os') == "x '''; import os"
