"""The nodes of an autograd graph, in an order in which each comes after all below it."""

import torch

from fxpipe.runtime.nodes import nodes_below


def test_a_node_comes_after_all_below_it() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(2, 3, requires_grad=True)
    first = (x @ weight).tanh()
    out = (first + (first @ weight).sin() * first).sum()
    below = nodes_below([out.grad_fn, first.grad_fn])

    places = {node: k for k, node in enumerate(below)}
    assert len(places) == 9  # sum, add, mul, sin, two products, tanh and two leaves
    assert all(places[n] < places[node] for node, nodes in below.items() for n in nodes)
    assert all(
        nodes == [n for n, _ in node.next_functions if n is not None]
        for node, nodes in below.items()
    )


def test_a_node_is_below_once_for_each_edge() -> None:
    x = torch.randn(3, requires_grad=True).sin()
    square = (x * x).grad_fn

    assert nodes_below([square])[square] == [x.grad_fn, x.grad_fn]


def test_nothing_is_looked_for_below_the_ends() -> None:
    x = torch.randn(3, requires_grad=True).sin()
    out = x.cos()

    assert nodes_below([out.grad_fn], {x.grad_fn}) == {x.grad_fn: [], out.grad_fn: [x.grad_fn]}
