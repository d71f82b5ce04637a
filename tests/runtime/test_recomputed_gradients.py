"""Gradients of stages that recompute: which values have one, and what hooks make of them."""

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.runtime.call import Call


class Rotates(nn.Module):
    """`angles` has no gradient as it was traced; it would, if `scale` or `places` had one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.rand(6), requires_grad=False)

    def forward(self, x, places):
        angles = (places * self.scale).cos()
        for layer in self.layers:
            x = layer(x).tanh() * angles
        return x


def loss_fn(output, _):
    return output.square().mean()


@pytest.fixture
def both(tmp_path):
    torch.manual_seed(0)
    model = Rotates().double()
    inputs = torch.rand(8, 6).double(), torch.rand(8, 6).double()
    package = fxpipe.compile(
        model, inputs, devices="cpu*2", microbatches=4, checkpoint="always", profile="analytic:cpu"
    )
    return model, fxpipe.load(package.write(tmp_path / "out", weights=True)), inputs


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def sent(pipe, inputs, monkeypatch):
    """Which values between stages were said to have a gradient."""
    found = {}
    send = Call.send_value

    def listens(self, wire, i, tensor, gradient):
        found[wire.value] = gradient
        send(self, wire, i, tensor, gradient)

    monkeypatch.setattr(Call, "send_value", listens)
    pipe.step(*inputs, loss_fn=loss_fn)
    return [gradient for name, gradient in found.items() if name.startswith("angles")]


def test_what_has_no_gradient_is_sent_as_having_none(both, monkeypatch):
    model, pipe, inputs = both
    assert sent(pipe, inputs, monkeypatch) == [False]
    loss_fn(model(*inputs), None).backward()
    torch.testing.assert_close(gradients(pipe), gradients(model))


def test_a_parameter_that_is_trained_later_has_its_gradient(both, monkeypatch):
    model, pipe, inputs = both
    for module in (model, pipe):
        dict(module.named_parameters())["scale"].requires_grad_()
    assert sent(pipe, inputs, monkeypatch) == [True]
    loss_fn(model(*inputs), None).backward()
    torch.testing.assert_close(gradients(pipe), gradients(model))
    assert model.scale.grad is not None


def test_an_input_that_is_given_a_gradient_later_gets_it(both, monkeypatch):
    model, pipe, inputs = both
    x, places = inputs
    copies = [places.clone().requires_grad_() for _ in range(2)]
    assert sent(pipe, (x, copies[0]), monkeypatch) == [True]
    loss_fn(model(x, copies[1]), None).backward()
    torch.testing.assert_close(copies[0].grad, copies[1].grad)


@pytest.mark.parametrize("trained", [False, True])
def test_so_has_a_closures_backward(both, trained):
    model, pipe, inputs = both
    for module in (model, pipe):
        dict(module.named_parameters())["scale"].requires_grad_(trained)
        loss_fn(module(*inputs), None).backward()
    torch.testing.assert_close(gradients(pipe), gradients(model))


class Tied(nn.Module):
    """Its second and third layer have one weight, on whichever stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.layers[2].weight = self.layers[1].weight

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("devices", [2, 1])
def test_a_hook_changes_a_parameters_gradient_once(tmp_path, checkpoint, devices):
    torch.manual_seed(0)
    model, x = Tied().double(), torch.rand(8, 6).double()
    package = fxpipe.compile(
        model,
        (x,),
        devices=devices,
        microbatches=4,
        checkpoint=checkpoint,
        profile="analytic:cpu",
    )
    pipe = fxpipe.load(package.write(tmp_path / "out", weights=True))
    for module in (model, pipe):
        for name in ("layers.1.weight", "layers.3.weight"):
            module.get_parameter(name).register_hook(lambda gradient: 2 * gradient)
        loss_fn(module(x), None).backward()
    torch.testing.assert_close(gradients(pipe), gradients(model))
