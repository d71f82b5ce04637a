"""Between different devices values, gradients and tied weights are copied, and nothing changes.

`cpu:0` and `cpu:1` are one CPU, but torch holds them to be different and copies between them.
"""

import pytest
import torch
from toys import (
    MODES,
    NOISY,
    SKIPS,
    TIED,
    TOYS,
    assert_same_state,
    both,
    mean_loss,
    plain_step,
    same,
)

from fxpipe.runtime.copy import Links, new_copy_streams


@pytest.mark.usefixtures("_apart")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TOYS)
def test_the_same_numbers_on_different_devices(tmp_path, name, mode):
    toy = TOYS[name]
    model, pipe = both(tmp_path, toy, schedule="1f1b", checkpoint=mode)
    x = toy.inputs()
    for run in ("step", "call"):
        torch.manual_seed(5)
        expected = plain_step(toy, model, x, 4, toy is NOISY)
        torch.manual_seed(5)
        if run == "step":
            assert same(pipe.step(*x, loss_fn=mean_loss), expected)
        else:
            mean_loss(pipe(*x)).backward()
        assert_same_state(pipe, model)


@pytest.mark.usefixtures("_apart")
def test_a_tied_weight_elsewhere_is_a_copy_of_its_owner_at_each_call(tmp_path):
    model, pipe = both(tmp_path, TIED)
    assert pipe._stages[2].module.head.weight is None
    for _ in range(2):
        with torch.no_grad():
            pipe.embed.weight.mul_(1.5)
            model.embed.weight.mul_(1.5)
            assert same(pipe(*TIED.inputs()), model(*TIED.inputs()))


@pytest.mark.usefixtures("_apart")
def test_callers_tensors_get_their_gradients_from_other_devices(tmp_path):
    model, pipe = both(tmp_path, SKIPS)
    plain, stepped = SKIPS.inputs()[0].requires_grad_(), SKIPS.inputs()[0].requires_grad_()
    plain_step(SKIPS, model, (plain,), 4)
    pipe.step(stepped, loss_fn=mean_loss)
    assert same(stepped.grad, plain.grad)


def _sent(devices):
    links = Links(devices, new_copy_streams(devices, 1))
    x = torch.ones(2, requires_grad=True)
    y = links.receive(links.send(x * 2, 0, 1, 0), 0, 1, 0)
    y.pow(2).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 8.0))
    whole = torch.arange(3)
    return whole, links.receive(links.send(whole, 0, 1, 0), 0, 1, 0)


def test_between_lanes_of_one_device_nothing_is_copied():
    whole, arrived = _sent([torch.device("cpu")] * 2)
    assert arrived is whole


def test_between_devices_memory_is_copied():
    whole, arrived = _sent([torch.device("cpu", 0), torch.device("cpu", 1)])
    assert arrived.data_ptr() != whole.data_ptr()
    assert torch.equal(arrived, whole)
