"""A pipeline that is moved to another dtype takes what the model takes that is moved so."""

import pytest
import torch
from flat import compile_flat
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.capture import capture


class Layer(nn.Module):
    """Computes in float32 and goes on in the dtype of what it uses next."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6), requires_grad=False)
        self.register_buffer("shift", torch.rand(6), persistent=False)

    def forward(self, x):
        low = torch.finfo(self.linear.weight.dtype).tiny
        y = self.linear(x.float().sin().to(self.linear.weight.dtype))
        y = y.masked_fill(y > 2, low).softmax(-1)
        y = F.dropout(y.float() / 3, 0.0, self.training).to(self.scale.dtype)
        if not self.training:
            y = y.masked_fill(y < 0, low)
        return x + y * self.scale + (x / 7).to(self.shift.dtype)


class Tower(nn.Module):
    """A tied weight, and casts far from all parameters."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    def forward(self, x):
        y = self.first(x.to(self.dtype))
        for layer in self.layers:
            y = layer(y)
        y = self.last(y.double().cos().to(self.dtype)).double()
        y = ((y.exp() + 1).log() / 3).to(self.dtype) / 7
        return y.sin(), (y * 2).double().sin().to(x.dtype) / 3


@pytest.fixture(scope="module", params=[(1, "always"), (2, "never"), (7, "never")])
def package(request, tmp_path_factory):
    devices, checkpoint = request.param
    x = (torch.randn(4, 6),)
    package = compile_flat(Tower(), x, devices=devices, microbatches=2, checkpoint=checkpoint)
    return package.write(tmp_path_factory.mktemp("moved") / "out")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("given", ["moved", "as it was"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_as_the_model_does(dtype, given, autocast, package):
    torch.manual_seed(0)
    model, pipe = Tower().to(dtype), fxpipe.load(package)
    pipe.load_state_dict(model.state_dict())
    pipe.to(dtype)
    x = torch.randn(2, 6, dtype=dtype if given == "moved" else torch.float32)
    for training in (True, False):
        model.train(training), pipe.train(training)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            found, expected = pipe(x), [model(row) for row in x.split(1)]
        for one, rows in zip(found, zip(*expected, strict=True), strict=True):
            assert one.dtype == rows[0].dtype
            torch.testing.assert_close(one, torch.cat(rows))


def written(model):
    """The lines of the one stage of a model."""
    files = compile_flat(model, (torch.randn(4, 6),), devices=1, microbatches=2).files
    return [line.partition("  #")[0].strip() for line in files["stage_0.py"].splitlines()]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)


def test_it_reads_as_the_user_wrote_it():
    class Model(Two):
        def forward(self, x):
            y = self.a(x.float()).sigmoid()
            y = self.b(y.to(self.b.weight.dtype))
            return y.to(x.dtype)

    lines = written(Model())
    assert "y = self.b(y.to(self.b.weight.dtype))" in lines
    assert "return y.to(x.dtype)" in lines


def test_what_is_read_often_is_bound_once():
    class Model(Two):
        def forward(self, x):
            dtype = self.a.weight.dtype
            x = self.a(x.to(dtype)).sin().to(dtype).cos()
            return self.b(x).to(dtype)

    lines = written(Model())
    assert "dtype = self.a.weight.dtype" in lines
    assert "return self.b(x).to(dtype)" in lines


def test_a_repeated_module_without_parameters_is_no_class_if_it_asks_for_their_dtype():
    class Cast(nn.Module):
        def __init__(self, of):
            super().__init__()
            self.of = [of]  # no module of its own

        def forward(self, x):
            return x.double().sin().to(self.of[0].weight.dtype).cos()

    class Model(Two):
        def __init__(self):
            super().__init__()
            self.one, self.two = Cast(self.a), Cast(self.b)

        def forward(self, x):
            return self.two(self.b(self.one(self.a(x))))

    files = compile_flat(Model(), (torch.randn(4, 6),), devices=1, microbatches=2).files
    assert "dtype = self.b.weight.dtype" in files["stage_0.py"]
    assert "blocks.py" not in files


def test_a_limit_of_a_parameters_dtype_stays_open_in_both_modes():
    class Masks(Two):
        def forward(self, x):
            low = torch.finfo(self.a.weight.dtype).min
            x = torch.where(x > 0, self.a(x), low)
            if self.training:
                return F.dropout(self.b(x.softmax(-1)), 0.5)
            return self.b(x.softmax(-1)).clamp(min=low)

    captured = capture(Masks(), (torch.randn(4, 6),), {})
    limits = [name for name, text in captured.literals.items() if text == "torch.finfo(dtype).min"]
    read = {used.name for node in captured.graph.nodes for used in node.all_input_nodes}
    assert len(read & set(limits)) == 1
    assert captured.checked == "train and eval"
