"""Whose gradients come in the layout of the value that they are of."""

import pytest
import torch
from torch import fx

from fxpipe.costs.layouts import Layouts, in_own_layout, layouts_of

LINEAR = torch.nn.Linear(4, 6)


@pytest.mark.parametrize(
    ("op", "kept", "made"),
    [
        (torch.relu, True, False),  # an elementwise op hands on what it gets
        (LINEAR, True, True),  # a product is laid out anew
        (lambda x: x.sum(0), False, False),  # of a sum it is a view of less
    ],
)
def test_an_op_s_layouts(op, kept, made):
    x = torch.randn(2, 3, 4, requires_grad=True)
    assert layouts_of(op(x), [x], in_part=op is LINEAR, writes=False) == Layouts((kept,), (made,))


def test_of_an_op_that_writes_nothing_is_known_but_of_what_is_not_trained():
    x, rows = torch.randn(2, 4, requires_grad=True), torch.tensor([0])
    result = (x + 0).index_fill_(0, rows, 1.0)
    told = layouts_of(result, [x, rows], in_part=False, writes=True)
    assert told == Layouts((False, True), (False, True))


def test_each_reader_must_send_a_gradient_in_the_value_s_layout():
    graph = fx.Graph()
    x = graph.placeholder("x")
    # Read by a layer and by an op that hands on; the layer's result goes to the model's output.
    value, lone = graph.call_function(torch.relu, (x,)), graph.call_function(torch.relu, (x,))
    layer = graph.call_function(torch.matmul, (lone, value))
    handed = graph.call_function(torch.tanh, (value,))
    graph.output((layer, handed))
    layouts = {
        value: Layouts((True,), (False,)),
        lone: Layouts((True,), (False,)),
        layer: Layouts((True, True), (True, True)),
        handed: Layouts((True,), (False,)),
    }
    assert in_own_layout(layouts, lambda node: node.all_input_nodes) == {lone}
