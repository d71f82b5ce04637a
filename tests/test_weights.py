"""Weights in a package: one file for each stage, the original's names, each tensor once."""

import shutil

import models
import pytest
import torch
from flat import compile_flat
from safetensors import safe_open
from torch import nn

import fxpipe
from fxpipe.errors import PackageError, WeightsError


class Odd(nn.Module):
    """Weights that share memory, lie in another order, have no elements or belong to no stage."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.last.weight.data = self.first.weight.data  # shared, but not tied
        self.first.bias.data = torch.randn(12)[::2]
        self.unused = nn.Linear(2, 2)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("mask", torch.rand(6), persistent=False)

    def forward(self, x):
        return self.last(self.first(x) * self.mask) * self.scale


def compiled(model, x):
    return compile_flat(model, (x,), devices="cpu*2", microbatches=2)


def keys(out):
    found = {}
    for path in sorted((out / "weights").iterdir()):
        with safe_open(path, framework="pt") as file:
            found[path.name] = sorted(file.keys())
    return found


def test_a_tied_weight_stands_once(tmp_path):
    model, x = models.Tied(), torch.ones(4, 5, dtype=torch.long)
    out = compiled(model, x).write(tmp_path / "out", weights=True)
    assert keys(out) == {
        "stage_0.safetensors": ["body.0.bias", "body.0.weight", "embed.weight"],
        "stage_1.safetensors": ["body.2.bias", "body.2.weight"],
    }
    pipe = fxpipe.load(out)
    torch.testing.assert_close(pipe(x), model(x))
    assert pipe.head.weight is pipe.embed.weight


def test_weights_that_are_gone_are_missed(tmp_path):
    out = compiled(Odd(), torch.randn(4, 6)).write(tmp_path / "out", weights=True)
    shutil.rmtree(out / "weights")
    with pytest.warns(UserWarning, match="its folder weights is not here"):
        fxpipe.load(out)


def test_a_model_that_holds_nothing_has_no_weights_to_write(tmp_path):
    class Bare(nn.Module):
        def forward(self, x):
            return x.sin().cos().tanh()

    x = torch.randn(4, 6)
    out = compiled(Bare(), x).write(tmp_path / "out", weights=True)
    assert torch.equal(fxpipe.load(out)(x), Bare()(x))


def test_a_package_with_weights_equals_the_model_at_once(tmp_path):
    model, x = Odd().double(), torch.randn(4, 6).double()
    out = compiled(model, x).write(tmp_path / "out", weights=True)
    assert keys(out)["unused.safetensors"] == ["none", "unused.bias", "unused.weight"]
    pipe = fxpipe.load(out)
    state = model.state_dict()
    assert list(pipe.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in pipe.state_dict().items())
    torch.testing.assert_close(pipe(x), model(x), rtol=1e-12, atol=1e-12)


def test_a_file_of_the_weights_that_is_gone_is_missed(tmp_path):
    out = compiled(Odd(), torch.randn(4, 6)).write(tmp_path / "out", weights=True)
    (out / "weights/stage_1.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"weights do not fit .*\n.*3 missing: scale, last"):
        fxpipe.load(out)


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_what_safetensors_has_no_word_for_is_refused(tmp_path):
    class Complex(models.Chain):
        def __init__(self):
            super().__init__()
            self.register_buffer("phases", torch.ones(3, dtype=torch.complex128))

    package = compiled(Complex(), torch.randn(4, 6))
    with pytest.raises(PackageError, match="complex128"):
        package.write(tmp_path / "out", weights=True)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_memory_has_no_values_to_write(tmp_path):
    with fxpipe.without_memory():
        model = models.Chain()
    x = torch.randn(4, 6)
    package = fxpipe.compile(model, (x,), devices=2, microbatches=2, profile="analytic:h100")
    with pytest.raises(PackageError, match="Chain was built without memory"):
        package.write(tmp_path / "new" / "out", weights=True)
    assert list(tmp_path.iterdir()) == []
