"""What is put into a pipeline's tree is computed with, as in the plain model, or refused."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from toys import CHAIN, NORMED, TIED, both, mean_loss, same

from fxpipe.errors import InputError, WeightsError


def other(tensor):
    return nn.Parameter(torch.rand_like(tensor))


def test_an_assigned_parameter_is_computed_with_and_trained(tmp_path):
    model, pipe = both(tmp_path, CHAIN, schedule="1f1b")
    pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    model.first.weight = pipe.first.weight = other(model.first.weight)
    expected = mean_loss(model(*CHAIN.inputs()))
    (gradient,) = torch.autograd.grad(expected, model.first.weight)
    assert same(pipe.step(*CHAIN.inputs(), loss_fn=mean_loss), expected.detach())
    assert same(pipe.first.weight.grad, gradient)


def test_functional_call_computes_with_what_it_is_given_and_then_no_longer(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    before = pipe(*CHAIN.inputs())
    given = {name: other(p) for name, p in model.named_parameters()}
    expected = functional_call(model, given, CHAIN.inputs())
    found = functional_call(pipe, given, CHAIN.inputs())
    assert same(found, expected)
    for a, b in zip(
        torch.autograd.grad(found.sum(), [*given.values()]),
        torch.autograd.grad(expected.sum(), [*given.values()]),
        strict=True,
    ):
        assert same(a, b)
    assert same(pipe(*CHAIN.inputs()), before)


def test_assigned_buffers_are_computed_with_and_written(tmp_path):
    model, pipe = both(tmp_path, NORMED)
    mean = torch.rand_like(model.bn.running_mean)
    for module in (model, pipe):
        module.bn.running_mean = mean.clone()
    expected, found = model.eval()(*NORMED.inputs()), pipe.eval()(*NORMED.inputs())
    assert same(found, expected)
    pipe.train()(*NORMED.inputs())
    assert not torch.equal(pipe.bn.running_mean, mean)


def test_copies_follow_what_is_assigned_to_them_alone(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    copied = copy.deepcopy(pipe)
    copied.first.weight = other(copied.first.weight)
    assert not torch.equal(copied(*CHAIN.inputs()), pipe(*CHAIN.inputs()))


def replace_module(pipe):
    pipe.first = nn.Linear(6, 7).double()


def parametrize(pipe):
    parametrizations.weight_norm(pipe.first)


def other_shape(pipe):
    pipe.first.weight = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (replace_module, "module 'first' was replaced"),
        (parametrize, "'first.weight' is gone, as if it was parametrized or pruned"),
        (other_shape, r"'first.weight' was replaced by one of shape \[2, 2\], where it had"),
    ],
)
def test_what_stages_cant_follow_is_refused_with_the_way_out(tmp_path, change, told):
    _, pipe = both(tmp_path, CHAIN)
    change(pipe)
    with pytest.raises(WeightsError, match=told) as error:
        pipe(*CHAIN.inputs())
    assert "do that to the model, and compile it again" in str(error.value)


@pytest.mark.parametrize("way", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hook_that_no_code_would_call_is_refused(tmp_path, way):
    _, pipe = both(tmp_path, CHAIN)
    with pytest.raises(InputError, match="on a parameter, or on the pipeline itself"):
        getattr(pipe.first, f"register_{way}_hook")(lambda *_: None)
    seen = []
    pipe.register_forward_hook(lambda *_: seen.append("pipe"))
    pipe.first.weight.register_hook(lambda _: seen.append("weight"))
    pipe(*CHAIN.inputs()).sum().backward()
    assert seen[0] == "pipe"
    assert set(seen[1:]) == {"weight"}


def test_a_tied_parameter_is_assigned_at_each_of_its_places_or_refused(tmp_path):
    model, pipe = both(tmp_path, TIED)
    weight = other(model.head.weight)
    pipe.head.weight = weight
    with pytest.raises(WeightsError, match=r"'head.weight' and 'embed.weight' were one"):
        pipe(*TIED.inputs())
    pipe.embed.weight = model.head.weight = model.embed.weight = weight
    assert same(pipe(*TIED.inputs()), model(*TIED.inputs()))


def test_what_is_tied_later_is_refused(tmp_path):
    """Two lanes would add to its gradient at once."""
    _, pipe = both(tmp_path, NORMED)
    pipe.bn2.weight = pipe.bn.weight
    with pytest.raises(WeightsError, match=r"'bn2.weight' and 'bn.weight' are one now"):
        pipe(*NORMED.inputs())
