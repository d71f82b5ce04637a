"""What torch has for each thread is refused; gradients of gradients are the model's."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from toys import CHAIN, MODES, SKIPS, TIED, both, mean_loss, same

from fxpipe.errors import InputError, StageError


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


@pytest.mark.parametrize(
    "trace",
    [
        torch.jit.trace,
        lambda pipe, inputs: make_fx(pipe)(*inputs),
        lambda pipe, inputs: torch.export.export(pipe, inputs, strict=False),
    ],
    ids=["jit", "make_fx", "export"],
)
@pytest.mark.parametrize("toy", [CHAIN, SKIPS], ids=["chain", "skips"])
@pytest.mark.filterwarnings("ignore")  # of tracing
def test_a_trace_is_refused_and_leaves_nothing_behind(tmp_path, toy, trace):
    model, pipe = both(tmp_path, toy)
    inputs = toy.inputs()
    with pytest.raises(InputError, match=r"trace the model itself"):
        trace(pipe.requires_grad_(False), inputs)
    assert same(pipe(*inputs), model(*inputs))


def test_an_export_on_another_thread_is_none_of_this_one(tmp_path, monkeypatch):
    model, pipe = both(tmp_path, CHAIN)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)  # which all threads see
    assert same(pipe(*CHAIN.inputs()), model(*CHAIN.inputs()))


@pytest.mark.parametrize("mode", MODES)
def test_jacobians_are_the_models(tmp_path, mode):
    model, pipe = both(tmp_path, CHAIN, checkpoint=mode)
    (x,) = CHAIN.inputs(3)
    jacobian = torch.autograd.functional.jacobian
    assert same(jacobian(pipe, x), jacobian(model, x))


def twice(module, inputs):
    loss = module(*inputs).pow(2).sum()
    first = torch.autograd.grad(loss, [*module.parameters()], create_graph=True)
    return torch.autograd.grad(sum(g.pow(2).sum() for g in first), [*module.parameters()])


@pytest.mark.parametrize("mode", ["never", "segment"])
@pytest.mark.parametrize("toy", [CHAIN, SKIPS, TIED], ids=["chain", "skips", "tied"])
def test_gradients_of_gradients_are_the_models(tmp_path, toy, mode):
    model, pipe = both(tmp_path, toy, checkpoint=mode)
    for ours, plain in zip(twice(pipe, toy.inputs()), twice(model, toy.inputs()), strict=True):
        assert same(ours, plain)


@pytest.mark.parametrize("mode", ["except_last", "always"])
def test_gradients_of_gradients_do_not_come_through_what_is_computed_again(tmp_path, mode):
    _, pipe = both(tmp_path, CHAIN, checkpoint=mode)
    with pytest.raises(StageError, match="--checkpoint never"):
        twice(pipe, CHAIN.inputs())


def test_torchs_checkpoint_around_lanes_is_that_of_their_order_or_refused(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    (x,) = CHAIN.inputs()
    with pytest.raises(InputError, match="use_reentrant=True"):
        checkpoint(pipe, x, use_reentrant=False)
    for module in (model, pipe):
        checkpoint(module, x.requires_grad_(), use_reentrant=True).mean().backward()
    assert all(same(p.grad, pipe.get_parameter(name).grad) for name, p in model.named_parameters())
