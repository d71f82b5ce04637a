"""What a model does with its own tensors that a package could not do is refused, with a way out."""

import models
import pytest
import torch
from flat import verified
from torch import nn
from torch.nn import utils
from torch.utils.checkpoint import checkpoint

from fxpipe.capture import capture
from fxpipe.errors import CaptureError, InputError


class Base(models.Chain):
    """`prepare` makes what is tested; forward is `step` and then a chain of layers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.prepare()

    def prepare(self):
        pass

    def step(self, x):
        return self.layer(x)

    def forward(self, x):
        return self.layers(self.step(x))


class ParameterHook(Base):
    def prepare(self):
        self.layer.weight.register_hook(lambda gradient: gradient * 2)


class AccumulationHook(Base):
    def prepare(self):
        self.layer.bias.register_post_accumulate_grad_hook(print)


class ModuleHook(Base):
    def prepare(self):
        self.layer.register_full_backward_hook(print)


class TensorHook(Base):
    def step(self, x):
        y = self.layer(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y.sin()


class WritesParameter(Base):
    def step(self, x):
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        return self.layer(x)


class Clamps(Base):
    """Changes nothing the second time."""

    def step(self, x):
        self.layer.weight.data.clamp_(-0.1, 0.1)
        return self.layer(x)


class SetsData(Base):
    def step(self, x):
        self.layer.weight.data = self.layer.weight.data.clamp(-0.1, 0.1)
        return self.layer(x)


class DetachesInPlace(Base):
    """From within a checkpoint, what is read outside of it too."""

    def step(self, x):
        h = self.layer(x)

        def block():
            y = h * 2
            h.detach_()
            return y

        return checkpoint(block, use_reentrant=False) + h


class Renormalizes(Base):
    def prepare(self):
        self.table = nn.Embedding(5, 6, max_norm=1.0)

    def step(self, x):
        return x + self.table(x.argmax(1) % 5)


class Transforms(Base):
    def step(self, x):
        return self.layer(x) + torch.vmap(lambda row: row.sort().values)(x.detach())


class TransformsAModule(Base):
    def step(self, x):
        return torch.vmap(self.layer)(x)


class Gradient(Base):
    def step(self, x):
        return torch.func.grad(lambda x: self.layer(x).sum())(x)


class Resizes(Base):
    def prepare(self):
        self.register_buffer("least", torch.tensor([]))

    def step(self, x):
        if not self.least.numel():
            self.least.resize_(6).copy_(x.detach().amin(0))
        self.least.copy_(torch.minimum(self.least, x.detach().amin(0)))
        return self.layer(x)


class Chooses(Base):
    def step(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (self.layer(x),))


@torch.library.custom_op("tests::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


thrice.register_fake(torch.empty_like)
thrice.register_autograd(lambda _, gradient: gradient * 3)


class CallsAnOperator(Base):
    def step(self, x):
        return thrice(self.layer(x))


@torch.compiler.allow_in_graph
def halved(x):
    return x / 2


class CallsAFunction(Base):
    def step(self, x):
        return halved(self.layer(x))


class Differentiates(Base):
    def step(self, x):
        y = self.layer(x)
        return y - torch.autograd.grad(y.sin().sum(), y, create_graph=True)[0]


class GoesBack(Base):
    def step(self, x):
        y = self.layer(x)
        y.sum().backward(retain_graph=True)
        return y


class Scripted(Base):
    def prepare(self):
        self.layer = torch.jit.script(nn.Linear(6, 6))


class NewBuffer(Base):
    def step(self, x):
        self.register_buffer("seen", x.detach().mean(0))
        return self.layer(x) + self.seen


class HalfOfAWeight(Base):
    def prepare(self):
        self.half = self.layer.weight.detach()[:3]

    def step(self, x):
        return self.layer(x) + (x @ self.half.t()).sum(1, keepdim=True)


class Computed(Base):
    def prepare(self):
        self.scaled = self.layer.weight.exp()

    def step(self, x):
        return x @ self.scaled


class KnowsItIsTraced(Base):
    def step(self, x):
        return self.layer(2 * x if torch.compiler.is_compiling() else x)


class TwoBuffers(Base):
    def prepare(self):
        self.register_buffer("all", torch.ones(12))
        self.register_buffer("part", self.all[:6])

    def step(self, x):
        self.all.add_(1)
        return self.layer(x) * self.part


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (ParameterHook, r"parameter 'layer.weight' has a hook.*pipe.get_parameter"),
        (AccumulationHook, "parameter 'layer.bias' has a hook"),
        (ModuleHook, "module 'layer' has a hook for its backward.*autograd.Function"),
        (TensorHook, r"hook on a tensor \(test_refuse.py.*y.register_hook.*autograd.Function"),
        (WritesParameter, r"writes the parameter 'layer.weight' at test_refuse.py.*mul_\(0.5\)"),
        (Clamps, "writes the parameter 'layer.weight' at .*between steps, outside of forward"),
        (DetachesInPlace, r"in place \(test_refuse.py.*h.detach_\(\)\).*write h = h.detach\(\)"),
        (SetsData, r"assigns the `.data` of a tensor \(test_refuse.py"),
        (Renormalizes, "writes the parameter 'table.weight' at .*self.table"),
        (Transforms, r"torch.vmap or torch.func \(test_refuse.py.*whole tensors"),
        (TransformsAModule, r"torch.vmap or torch.func \(at .*test_refuse.py"),
        (Gradient, r"torch.vmap or torch.func \(at .*test_refuse.py"),
        (Resizes, r"the buffer 'least' another size, \[6\] where it was \[0\].*once before"),
        (
            Chooses,
            r"calls 'cond' \(test_refuse.py.*, which takes functions.*keep that module outside",
        ),
        (
            CallsAnOperator,
            r"'tests::thrice.default' is registered by the library 'tests'.*thrice\(",
        ),
        (CallsAFunction, r"calls .*test_refuse.halved \(test_refuse.py.*torch alone"),
        (Differentiates, r"computes gradients itself, at .*test_refuse.py[^$]*let the loss"),
        (GoesBack, r"computes gradients itself, at .*test_refuse.py[^$]*let the loss"),
        (Scripted, r"line .*: return self.layer\(x\)[^$]*(torch.jit.script|ScriptModules)"),
        (NewBuffer, "registers 'seen'.*in the constructor"),
        (HalfOfAWeight, "'half' shares memory with 'layer.weight', which changes"),
        (Computed, "'scaled' was computed of parameters.*in forward"),
        (
            KnowsItIsTraced,
            r"in train mode: output 0 differs by[^$]*is_compiling\(\)[^$]*graph-breaks",
        ),
        (TwoBuffers, "'all' shares memory with 'part', which changes"),
    ],
)
def test_what_would_be_lost_is_refused(kind, says):
    with pytest.raises(CaptureError, match=says):
        capture(kind(), (torch.randn(4, 6),), {})


def test_parameters_without_a_shape_are_told():
    with pytest.raises(InputError, match=r"'0.weight' has no shape yet.*once on its inputs"):
        capture(nn.Sequential(nn.LazyLinear(3)), (torch.randn(4, 6),), {})


class Parts(Base):
    """Two buffers beside each other in one memory, and a module under two names."""

    def prepare(self):
        first, second = torch.ones(12).chunk(2)
        self.register_buffer("first", first)
        self.register_buffer("second", second)
        self.norm = self.again = nn.BatchNorm1d(6)

    def step(self, x):
        self.first.add_(1)
        return self.again(self.norm(x) * self.second + self.first)


class Old(Base):
    """The parametrizations of old, which keep in an attribute what they compute of a parameter."""

    def prepare(self):
        self.weighted = utils.weight_norm(nn.Linear(6, 6))
        self.spectral = utils.spectral_norm(nn.Linear(6, 6))

    def step(self, x):
        return self.spectral(self.weighted(x))


class Scales(nn.Module):
    def forward(self, x):
        return x * self.table


class Passed(Base):
    """A plain tensor that two modules have, of which the first does not read it."""

    def prepare(self):
        self.unread, self.scales = nn.Identity(), Scales()
        self.unread.table = self.scales.table = torch.arange(6)

    def step(self, x):
        return self.scales(self.layer(x))


class Noted(Base):
    """What is no tensor is told in the state_dict, and taken out of it again."""

    def state_dict(self, *args, **kwargs):
        return {**super().state_dict(*args, **kwargs), "_note": {"width": 6}}

    def load_state_dict(self, state_dict, *args, **kwargs):
        assert state_dict["_note"] == {"width": 6}
        weights = {key: value for key, value in state_dict.items() if key != "_note"}
        return super().load_state_dict(weights, *args, **kwargs)

    def step(self, x):
        return self.layer(x)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", [Passed, Noted, Parts, Old], ids=lambda kind: kind.__name__)
def test_what_only_looks_alike_is_taken(kind, tmp_path):
    verified(kind, lambda rows: {"x": torch.randn(rows, 6)}, tmp_path)
