"""`y.to(h.dtype)` is written as such: under autocast `h` has another dtype than in the trace."""

import pytest
import torch
from flat import compile_flat, verified
from models import Chain
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.capture import capture


class Norm(nn.Module):
    """Llama's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class Experts(nn.Module):
    """Adds up what linear layers, of another dtype under autocast, make of all rows."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        weights = F.softmax(self.gate(x), dim=-1, dtype=torch.float32).to(x.dtype)
        out = torch.zeros_like(x)
        rows = torch.arange(x.size(0), device=x.device)
        for k, expert in enumerate(self.experts):
            out.index_add_(0, rows, (expert(x) * weights[:, k, None]).to(out.dtype))
        return out


class Attention(nn.Module):
    """Of each of six numbers to the others; all that is made of no value has its dtype of one."""

    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(6, 12)

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        scores = q[:, :, None] * k[:, None]
        mask = torch.ones(6, 6, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        bias = torch.eye(6, dtype=scores.dtype, device=x.device)
        return ((scores.softmax(-1) + bias) @ q[..., None].to(scores.dtype)).squeeze(-1).type_as(x)


class Sums(nn.Module):
    """In the dtype of a parameter, whatever is given."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x):
        return (x.to(self.scale.dtype) / 3).cumsum(-1) * self.scale


class Model(nn.Module):
    """Casts to dtypes of values near, of a parameter and of its input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            nn.ModuleList([Norm(), Attention(), Norm(), Experts(), nn.Linear(6, 6), Sums()])
            for _ in range(3)
        )
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        y = self.first(x).to(x.dtype)
        for first_norm, attention, norm, experts, linear, sums in self.blocks:
            y = y + attention(first_norm(y))
            y = y + sums(linear(y))
            y = y + experts(norm(y))
        y = F.silu(y @ self.last.weight.t()).to(self.last.weight.dtype)
        return y + self.last(x).to(y.dtype)


def rows(batch):
    return {"x": torch.randn(batch, 6)}


def test_such_a_model_is_equal_to_the_plain_one(tmp_path):
    verified(Model, rows, tmp_path)


@pytest.mark.parametrize("devices", [1, 2, 6])
def test_under_autocast_too(devices, tmp_path):
    torch.manual_seed(0)
    model = Model()
    package = compile_flat(model, kwargs=rows(4), devices=devices, microbatches=2)
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    x = torch.randn(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(x, loss_fn=lambda output, _: output.float().square().mean())
        for row in x.split(1):  # the micro-batches
            (model(row).float().square().mean() / 2).backward()
    found = dict(pipe.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name].grad, parameter.grad), name
    pipe.eval(), model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pipe(x), torch.cat([model(row) for row in x.split(1)]))


def written(forward):
    """The lines of the one stage of a chain with this forward."""

    class Model(Chain):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

    Model.forward = forward
    files = compile_flat(Model(), (torch.randn(4, 6),), devices=1, microbatches=2).files
    return [line.partition("  #")[0].strip() for line in files["stage_0.py"].splitlines()]


def test_it_reads_as_the_user_wrote_it():
    def forward(self, x):
        h = self.layer(x)
        dtype = h.dtype
        y = F.softmax(h * 2, dim=-1, dtype=torch.float32).to(dtype)
        y = y.masked_fill(y > 1, torch.finfo(h.dtype).min)
        return y + torch.zeros(6, dtype=h.dtype, device=h.device).exp()

    lines = written(forward)
    assert "y = F.softmax(h * 2, dim=-1, dtype=torch.float32).to(h.dtype)" in lines
    assert any("torch.zeros(6, dtype=h.dtype, device=device)" in line for line in lines)
    assert "y = y.masked_fill(y > 1, torch.finfo(h.dtype).min)" in lines


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="Dynamo negates numbers by itself")
def test_the_greatest_number_negated_is_the_least():
    def forward(self, x):
        h = self.layer(x)
        return h.masked_fill(h > 1, -torch.finfo(h.dtype).max).exp()

    assert "return h.masked_fill(h > 1, torch.finfo(h.dtype).min).exp()" in written(forward)


def test_what_its_own_op_says_to_have_the_dtype_is_not_cast_again():
    def forward(self, x):
        h = self.layer(x)
        h = h.to(h.dtype).float().float()
        return h.softmax(-1, dtype=torch.float32).to(torch.float32).exp()

    lines = written(forward)
    assert "h = h.float()" in lines
    assert "return h.softmax(-1, dtype=torch.float32).exp()" in lines


def test_a_cast_to_an_operand_stays():
    def forward(self, x):
        h = self.layer(x)  # of a lower dtype than x under autocast
        return (x * h).to(h).exp()

    assert "return (x * h).to(h).exp()" in written(forward)


def test_it_may_be_read_within_a_checkpoint_and_meant_outside():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def within(self, x):
            h = self.a(x)
            return h.sin(), h.dtype

        def forward(self, x):
            y, dtype = checkpoint(self.within, x, use_reentrant=False)
            return self.b(y).to(dtype)

    graph = capture(Model(), (torch.randn(4, 6),), {}).graph
    (read,) = graph.find_nodes(op="call_function", target=getattr)
    assert str(read.args[0].target) == "a"


def test_the_dtype_of_complex_numbers_is_read_too(tmp_path):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2) * 0.5)
            self.last = nn.Linear(6, 3)

        def forward(self, x):
            ft = torch.fft.rfft(x)
            kept = torch.zeros(x.size(0), 4, dtype=ft.dtype, device=x.device)
            kept[:, :3] = ft[:, :3] * torch.view_as_complex(self.weight)
            return self.last(torch.fft.irfft(kept, n=6))

    verified(Spectral, rows, tmp_path)
