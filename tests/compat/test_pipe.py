"""Pipe takes its partitions from the devices of its layers, and values of any kind."""

import copy

import pytest
import torch
from torch import nn

from fxpipe.compat import NoChunk, Pipe, WithDevice
from fxpipe.compat.utils import partition_model

MODES = ["always", "except_last", "never"]
CPU = torch.device("cpu")


def batch(rows=10, size=4):
    return torch.randn(rows, size, dtype=torch.float64)


@pytest.mark.parametrize("checkpoint", MODES)
def test_outputs_and_gradients_are_those_of_the_sequential(checkpoint):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    pipe = Pipe(copy.deepcopy(model), chunks=4, checkpoint=checkpoint)
    for rows in (8, 10, 1):
        x = batch(rows)
        expected, found = model(x), pipe(x)
        torch.testing.assert_close(found.local_value(), expected)
        assert found.to_here() is found.local_value()
        assert found.is_owner()
    for module, output in ((model, model(x)), (pipe, pipe(x).local_value())):
        module.zero_grad()
        output.square().sum().backward()
    for one, other in zip(model.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_backward_may_be_called_on_what_it_returns():
    x = torch.ones(1, requires_grad=True)
    Pipe(nn.Sequential(nn.Identity()))(x).backward()
    assert torch.equal(x.grad, torch.ones(1))


def test_each_layer_on_the_cpu_is_a_partition_and_nested_sequentials_are_taken_apart():
    a, b, c = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()
    pipe = Pipe(nn.Sequential(a, nn.Sequential(b, c)))
    assert [list(partition) for partition in pipe.partitions] == [[a], [b, c]]
    assert pipe.devices == [CPU, CPU]
    assert [pipe[k] for k in range(len(pipe))] == [a, b, c]
    assert list(pipe.state_dict()) == [
        "partitions.0.0.weight",
        "partitions.0.0.bias",
        "partitions.1.0.weight",
        "partitions.1.0.bias",
    ]


def test_neighbours_on_one_device_are_one_partition():
    layers = [nn.Linear(4, 4, device="meta"), nn.ReLU(), nn.Linear(4, 4, device="meta")]
    layers[1] = WithDevice(layers[1], "meta")
    pipe = Pipe(nn.Sequential(*layers, nn.Linear(4, 4)))
    assert pipe.devices == [torch.device("meta"), CPU]
    assert [len(partition) for partition in pipe.partitions] == [3, 1]
    assert isinstance(pipe[1], nn.ReLU)


def test_with_device_moves_its_layer():
    layer = nn.Linear(4, 4, device="meta")
    wrapped = WithDevice(layer, "meta")
    assert (wrapped.module, wrapped.device) == (layer, torch.device("meta"))
    assert Pipe(nn.Sequential(WithDevice(nn.Linear(4, 4), "meta")))[0].weight.is_meta


def test_a_layer_on_several_devices_is_refused():
    layer = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")])
    with pytest.raises(ValueError, match=r"please use .to\(\)"):
        Pipe(nn.Sequential(layer))


def test_parameters_may_be_shared_on_one_device():
    class Holds(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)

    shared = nn.Linear(4, 4).double()
    model = nn.Sequential(Holds(shared), Holds(shared))
    x = batch()
    model(x).sum().backward()
    expected = shared.weight.grad
    shared.weight.grad = None
    Pipe(model, chunks=3, checkpoint="always")(x).local_value().sum().backward()
    torch.testing.assert_close(shared.weight.grad, expected)


class Mixed(nn.Module):
    """Tensors, numbers, text and None in; the same, in another order, out."""

    def forward(self, scale, x, shift, text):
        x = x * scale
        return (text, x if shift is None else x + shift, scale + 1, None)


class Reordered(nn.Module):
    def forward(self, text, x, scale, nothing):
        return x, [text, scale], nothing


@pytest.mark.parametrize("checkpoint", MODES)
def test_what_is_no_tensor_goes_to_each_micro_batch_and_comes_back_as_a_list(checkpoint):
    pipe = Pipe(nn.Sequential(Mixed(), Reordered()), chunks=3, checkpoint=checkpoint)
    x = batch(5).requires_grad_()  # in 3 micro-batches, of 2, 2 and 1 rows
    for shift in (None, batch(5)):
        y, pairs, nothing = pipe(2, x, shift, "t").local_value()
        torch.testing.assert_close(y, x * 2 if shift is None else x * 2 + shift)
        assert pairs == [["t", 3]] * 3
        assert nothing == [None] * 3
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


@pytest.mark.parametrize("checkpoint", MODES)
def test_no_chunk_gives_each_micro_batch_the_whole_tensor(checkpoint):
    class Weighted(nn.Module):
        def forward(self, x, weight):
            return x @ weight

    weight = batch(4, 2).requires_grad_()
    pipe = Pipe(nn.Sequential(Weighted()), chunks=4, checkpoint=checkpoint)
    x = batch()
    output = pipe(x, NoChunk(weight)).local_value()
    torch.testing.assert_close(output, x @ weight)
    output.sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0)[:, None].expand(4, 2))
    with pytest.raises(TypeError, match="NoChunk only supported for tensors"):
        NoChunk(3)


def test_what_is_refused():
    class Texts(nn.Module):
        def forward(self, x):
            return "a", "b"

    class Changing(nn.Module):
        def forward(self, x):
            return x, "a" if len(x) > 1 else 1

    pipe = Pipe(nn.Sequential(nn.Identity()), chunks=4)
    with pytest.raises(TypeError, match="inputs do not have any tensors"):
        pipe("text", None)
    with pytest.raises(ValueError, match="same device as the first partition"):
        pipe(torch.ones(4, device="meta"))
    with pytest.raises(RuntimeError, match="Found different number of chunks"):
        pipe(batch(4), batch(3))
    with pytest.raises(TypeError, match="No tensors found"):
        Pipe(nn.Sequential(Texts()))(batch())
    with pytest.raises(TypeError, match="Types for microbatch outputs do not match"):
        Pipe(nn.Sequential(Changing()), chunks=2)(batch(3))
    with pytest.raises(TypeError, match=r"must be nn\.Sequential"):
        Pipe(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="Pipe should manage device placement"):
        pipe.to("cpu")


def test_a_pipe_without_layers_returns_its_input():
    x = batch()
    assert Pipe(nn.Sequential())(x).local_value() is x


@pytest.mark.parametrize("checkpoint", MODES)
def test_deferred_batch_norm_sees_the_mini_batch(checkpoint):
    norm = nn.BatchNorm1d(4).double()
    model = nn.Sequential(copy.deepcopy(norm))
    pipe = Pipe(model, chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    x = batch(12)
    norm(x)
    pipe(x).local_value().sum().backward()
    torch.testing.assert_close(pipe[0].running_mean, norm.running_mean)
    torch.testing.assert_close(pipe[0].running_var, norm.running_var)


def test_partition_model_makes_a_sequential_for_each_device():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    parts = partition_model(nn.Sequential(*layers), [1, 2], ["cpu", "cpu"])
    assert [list(part) for part in parts] == [layers[:1], layers[1:]]
    assert len(Pipe(parts).partitions) == 2
    for balance, devices in (([1, 1], ["cpu"] * 2), ([1, 2], ["cpu"])):
        with pytest.raises(ValueError, match="does not fit"):
            partition_model(nn.Sequential(*layers), balance, devices)
