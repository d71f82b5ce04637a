import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from fxpipe.runtime.backward import backward


def test_gradients_are_those_of_torch():
    weight = torch.randn(3, requires_grad=True)
    roots, gradients = [weight * 2, weight.exp()], [torch.randn(3), torch.randn(3)]
    expected = torch.autograd.grad(roots, [weight], gradients, retain_graph=True)
    backward([roots[0], get_gradient_edge(roots[1])], gradients)
    assert torch.equal(weight.grad, expected[0])


def test_they_add_up_and_the_graph_is_freed():
    weight = torch.ones(1, requires_grad=True)
    for _ in range(2):
        root = weight.exp()
        backward([root], [torch.ones(1)])
    torch.testing.assert_close(weight.grad, 2 * torch.ones(1).exp())
    with pytest.raises(RuntimeError, match="second time"):
        backward([root], [torch.ones(1)])
