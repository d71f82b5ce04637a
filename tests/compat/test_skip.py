"""What a layer stashes a later one pops, in other partitions too, without those between."""

import copy

import pytest
import torch
from torch import nn

from fxpipe.compat import GPipe, Pipe
from fxpipe.compat.skip import Namespace, pop, skippable, stash, verify_skippables
from fxpipe.compat.skip.layout import inspect_skip_layout

MODES = ["always", "except_last", "never"]


@skippable(stash=["early"])
class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        yield stash("early", x * 2)
        return self.linear(x)


@skippable(pop=["early"])
class Last(nn.Module):
    def forward(self, x):
        early = yield pop("early")
        return x * early


def model():
    torch.manual_seed(0)
    return nn.Sequential(First(), nn.Linear(4, 4), Last(), nn.Linear(4, 2)).double()


def batch(rows=10):
    return torch.randn(rows, 4, dtype=torch.float64)


def gradients(module, x, output):
    module.zero_grad()
    output.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("balance", [[4], [3, 1], [2, 2], [1, 1, 2], [1, 1, 1, 1]], ids=str)
def test_skips_give_the_numbers_of_the_sequential(balance, checkpoint):
    plain = model()
    devices = ["cpu"] * len(balance)
    pipe = GPipe(copy.deepcopy(plain), balance, devices=devices, chunks=3, checkpoint=checkpoint)
    xs = [batch().requires_grad_() for _ in range(2)]
    xs[1].data.copy_(xs[0])
    expected = gradients(plain, xs[0], plain(xs[0]))
    found = gradients(pipe, xs[1], pipe(xs[1]))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval()(xs[1]), plain(xs[0]))


def test_a_skip_goes_past_the_partitions_between():
    seen = []

    class Sees(nn.Module):
        def forward(self, *inputs):
            seen.append(len(inputs))
            return inputs[0]

    layers = [First(), Sees(), Sees(), Last()]
    GPipe(nn.Sequential(*layers).double(), [1] * 4, devices=["cpu"] * 4, chunks=2)(batch())
    assert seen == [1] * 4
    routes = inspect_skip_layout([nn.Sequential(layer) for layer in layers])
    assert routes.stashed == [{(None, "early"): 3}, {}, {}, {}]
    assert routes.popped == [{}, {}, {}, {(None, "early"): 0}]


def test_nested_sequentials_may_hold_both_ends():
    plain = nn.Sequential(nn.Sequential(First(), nn.ReLU()), nn.Sequential(nn.ReLU(), Last()))
    plain.double()
    pipe = Pipe(copy.deepcopy(plain), chunks=2)
    x = batch()
    torch.testing.assert_close(pipe(x).local_value(), plain(x))


@pytest.mark.parametrize("checkpoint", MODES)
def test_none_may_be_stashed(checkpoint):
    @skippable(stash=["none"])
    class StashNone(nn.Module):
        def forward(self, x):
            yield stash("none", None)
            return x

    @skippable(pop=["none"])
    class PopNone(nn.Module):
        def forward(self, x):
            assert (yield pop("none")) is None
            return x

    layers = nn.Sequential(StashNone(), PopNone())
    x = batch().requires_grad_()
    pipe = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    pipe(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_layers_may_take_and_return_several_values_and_use_several_skips():
    @skippable(stash=["a", "b"])
    class Two(nn.Module):
        def forward(self, x, y):
            yield stash("a", x)
            yield stash("b", y)
            return y, x

    @skippable(pop=["b", "a"])
    class Both(nn.Module):
        def forward(self, y, x):
            a = yield pop("a")
            b = yield pop("b")
            return a - x, b - y

    pipe = Pipe(nn.Sequential(Two(), Both()), chunks=2)
    for output in pipe(batch(), batch()).local_value():
        assert not output.any()


def test_namespaces_keep_skips_of_one_name_apart():
    outer, inner = Namespace(), Namespace()
    layers = [
        First().isolate(outer),
        First().isolate(inner, only=["early"]),
        Last().isolate(inner),
        Last().isolate(outer),
    ]
    plain = nn.Sequential(*layers).double()
    verify_skippables(plain)
    x = batch()
    expected = plain(x)
    pipe = GPipe(copy.deepcopy(plain), [1, 1, 1, 1], devices=["cpu"] * 4, chunks=2)
    torch.testing.assert_close(pipe(x), expected)
    assert copy.copy(outer) == outer != inner


def test_a_skip_that_does_not_match_is_named():
    layers = nn.Sequential(Last(), First(), nn.Sequential(First()))
    with pytest.raises(TypeError) as caught:
        verify_skippables(layers)
    assert str(caught.value).splitlines()[2:] == [
        "* '0' declared 'early' as poppable but it was not stashed",
        "* '2.0' redeclared 'early' as stashable but not isolated by namespace",
        "* no module declared 'early' as poppable but stashed",
    ]
    with pytest.raises(TypeError, match="do not match"):
        GPipe(layers, [3], devices=["cpu"])


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, x: (yield stash("other", x)), "'other' has not been declared as stashable"),
        (lambda self, x: (yield pop("other")), "'other' has not been declared as poppable"),
        (lambda self, x: x, "'mine' must be stashed but have not"),
    ],
)
def test_what_is_yielded_must_have_been_declared(forward, message):
    layer = skippable(stash=["mine"])(type("Layer", (nn.Module,), {"forward": forward}))
    with pytest.raises(RuntimeError, match=message):
        layer()(torch.ones(1))


def test_other_things_must_not_be_yielded():
    layer = skippable()(type("Layer", (nn.Module,), {"forward": lambda self, x: (yield x)}))
    with pytest.raises(TypeError, match="is not a command from @skippable"):
        layer()(torch.ones(1))


def test_a_skippable_prints_as_its_layer_and_keeps_its_keys():
    layer = First()
    assert repr(layer).startswith("@skippable(First(\n  (linear): Linear(")
    assert list(layer.state_dict()) == ["module.linear.weight", "module.linear.bias"]
