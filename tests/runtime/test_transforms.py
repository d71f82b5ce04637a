"""Transforms that torch has for each thread are refused: other lanes would not see them."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from toys import CHAIN, both, mean_loss, same

from fxpipe.errors import InputError


def by_jvp(pipe, x):
    return func.jvp(pipe, (x,), (x,))


def by_grad(pipe, x):
    return func.grad(lambda x: pipe(x).sum())(x)


def by_vmap(pipe, x):
    return func.vmap(pipe)(x[None])


def by_dual_numbers(pipe, x):
    with forward_ad.dual_level():
        return pipe(forward_ad.make_dual(x, x))


def of_a_step(pipe, x):
    return func.grad(lambda x: pipe.step(x, loss_fn=mean_loss))(x)


@pytest.mark.parametrize("transform", [by_jvp, by_grad, by_vmap, by_dual_numbers, of_a_step])
def test_a_transform_is_refused_with_the_way_out(tmp_path, transform):
    _, pipe = both(tmp_path, CHAIN)
    with pytest.raises(InputError, match=r"take gradients by backward\(\) or torch.autograd.grad"):
        transform(pipe, *CHAIN.inputs())


def test_gradients_of_gradients_and_jacobians_are_the_models(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    (x,) = CHAIN.inputs(3)
    jacobian = torch.autograd.functional.jacobian
    assert same(jacobian(pipe, x), jacobian(model, x))

    def twice(module):
        loss = module(x).pow(2).sum()
        first = torch.autograd.grad(loss, [*module.parameters()], create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), [*module.parameters()])

    for ours, plain in zip(twice(pipe), twice(model), strict=True):
        assert same(ours, plain)
