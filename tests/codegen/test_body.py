"""Body: a forward reads as the user wrote it."""

import re
import textwrap

import pytest
import torch
from flat import compile_flat, cut_everywhere, verified
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxpipe
from fxpipe.runtime.attention import kernels_in_order


def body(model, *args):
    """The lines of a one-stage forward without comments."""
    package = compile_flat(model, args, devices="cpu*1", microbatches=2)
    _, _, text = package.files["stage_0.py"].partition("-> Tensor:\n")
    lines = [line.split("  # ")[0].rstrip() for line in textwrap.dedent(text).splitlines()]
    return [line for line in lines if line and not line.lstrip().startswith("#")]


def test_one_expression_of_the_user_is_one_expression_again():
    class Nested(nn.Module):
        def forward(self, x):
            return F.relu((x + 1).sum(1) * 2)

    assert body(Nested(), torch.randn(4, 6)) == [
        "return F.relu((x + 1).sum(1) * 2)",
    ]


def test_tuples_are_unpacked_and_what_nobody_reads_is_an_underscore():
    class Unpacks(nn.Module):
        def forward(self, x):
            a, _, c = x.chunk(3, dim=1)
            return a * c

    assert body(Unpacks(), torch.randn(4, 6)) == [
        "a, _, c = x.chunk(3, dim=1)",
        "return a * c",
    ]


def test_a_result_that_is_wanted_alone_is_taken_alone_so_that_no_variable_holds_the_others():
    class Takes(nn.Module):
        def forward(self, x):
            largest, _ = x.max(1, keepdim=True)
            _, places = x.sort(1)
            return x * largest + places

    assert body(Takes(), torch.randn(4, 6)) == [
        "largest = x.max(1, keepdim=True)[0]",
        "places = x.sort(1)[1]",
        "return x * largest + places",
    ]


def test_a_variable_is_written_again_once_nobody_reads_its_value():
    class Again(nn.Module):
        def forward(self, x):
            y = x * 2
            x = y + 1
            x = x * y
            return x - 3

    assert body(Again(), torch.randn(4, 6)) == [
        "y = x * 2",
        "x = y + 1",
        "x = x * y",
        "return x - 3",
    ]


def test_regions_are_with_blocks():
    class Regions(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                y = x * 2
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = x @ y.T
            with torch.autocast("cuda", enabled=False):  # not the device's that the model is on
                z = z.sum(1, keepdim=True)
            return z * x

    assert body(Regions(), torch.randn(4, 6)) == [
        "device = x.device",
        "with torch.no_grad():",
        "    y = x * 2",
        "with torch.autocast(device.type, dtype=torch.bfloat16, enabled=True):",
        "    z = x @ y.T",
        'with torch.autocast("cuda", enabled=False):',
        "    z = z.sum(1, keepdim=True)",
        "return z * x",
    ]


def test_what_sizes_alone_are_read_of_is_not_computed():
    class Shaped(nn.Module):
        def forward(self, x):
            ones = torch.ones(x.shape[:-1]).to(x.device)
            zeros = torch.zeros(x[:, 0].shape, device=x.device)
            return x * zeros[:, None] + ones[..., None]

    assert body(Shaped(), torch.randn(4, 3, 6)) == [
        "batch, length, length_2 = x.shape",
        "device = x.device",
        "ones = torch.ones((batch, length), device=device)",
        "zeros = torch.zeros((batch, length_2), device=device)",
        "product = x * zeros[:, None]",
        "return product + ones[..., None]",
    ]


def test_kernels_of_attention_are_with_blocks():
    class Kernels(nn.Module):
        def forward(self, x):
            with sdpa_kernel(SDPBackend.MATH):
                y = F.scaled_dot_product_attention(x, x, x)
                with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                    z = F.scaled_dot_product_attention(y, y, y)
                y = F.scaled_dot_product_attention(z, z, y)
            with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
                return F.scaled_dot_product_attention(y, z, z)

    before = kernels_in_order()
    assert body(Kernels(), torch.randn(4, 2, 3, 8)) == [
        "with sdpa_kernel([SDPBackend.MATH]):",
        "    y = F.scaled_dot_product_attention(x, x, x)",
        "with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):",
        "    z = F.scaled_dot_product_attention(y, y, y)",
        "with sdpa_kernel([SDPBackend.MATH]):",
        "    y = F.scaled_dot_product_attention(z, z, y)",
        "with sdpa_kernel(",
        "    [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True",
        "):",
        "    output = F.scaled_dot_product_attention(y, z, z)",
        "return output",
    ]
    assert kernels_in_order() == before


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(4))

    def forward(self, x):
        for qkv in self.qkv:
            q, k, v = qkv(x).chunk(3, -1)
            with sdpa_kernel([SDPBackend.MATH]):
                x = x + F.scaled_dot_product_attention(q, k, v)
        return x


def test_attention_by_chosen_kernels_computes_what_the_model_does(tmp_path):
    before = kernels_in_order()
    package = verified(Attention, lambda rows: {"x": torch.randn(rows, 3, 8)}, tmp_path)
    assert "torch.nn.attention._" not in "".join(package.files.values())
    assert kernels_in_order() == before


def test_inference_mode_is_no_grad_and_its_end_is_as_before():
    class Inference(nn.Module):
        def forward(self, x):
            with torch.inference_mode():
                y = x * 2
                with torch.inference_mode(False):
                    z = x * 3
                y = y + 1
            return x * y + z

    assert body(Inference(), torch.randn(4, 6)) == [
        "with torch.no_grad():",
        "    y = x * 2",
        "z = x * 3",
        "with torch.no_grad():",
        "    y = y + 1",
        "return x * y + z",
    ]
    assert torch.is_grad_enabled()


def test_each_stage_opens_a_divided_region_again():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

        def forward(self, x):
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                return self.layers(x)

    package = compile_flat(Cast(), (torch.randn(4, 6),), devices="cpu*2", microbatches=2)
    for j in range(2):
        assert package.files[f"stage_{j}.py"].count("with torch.autocast(device.type") == 1


def test_a_module_that_a_group_names_twice_gets_a_variable():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.shift = nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return x * self.scale + self.shift

    model = nn.Module()
    model.blocks = nn.ModuleList([Inner()])
    model.forward = lambda x: model.blocks[0](x)
    assert body(model, torch.randn(4, 6)) == [
        'block = self.blocks["0"]',
        "return x * block.scale + block.shift",
    ]


@pytest.mark.parametrize("digits", range(16, 19))
def test_a_comment_never_breaks_the_line_that_returns(digits):
    class Limited(nn.Module):
        def __init__(self):
            super().__init__()
            self.limit = int("1" * digits)

        def forward(self, x):
            x = x.clamp(-self.limit, self.limit)
            return x

    assert body(Limited(), torch.randn(4, 6)) == [
        f"return x.clamp(-{'1' * digits}, {'1' * digits})",
    ]


def test_a_write_in_place_stays_a_statement():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 2
            y += x
            y[:, 0] = 1
            return y

    assert body(InPlace(), torch.randn(4, 6)) == [
        "y = x * 2",
        "y += x",
        "y[:, 0] = 1",
        "return y",
    ]


def test_data_of_a_buffer_is_written_as_the_user_wrote_it(tmp_path):
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            y = self.mix(x)
            self.mean.data.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            return y - self.mean

    def rows(batch):
        return {"x": torch.randn(batch, 6)}

    package = verified(Average, rows, tmp_path, devices="cpu*1")
    assert "self.mean.data.mul_(0.9)" in package.files["stage_0.py"]


def test_each_mode_stands_in_one_branch():
    class Shrinks(nn.Module):
        def forward(self, x):
            x = (x * 2).relu() + 1 if self.training else (x * 3).sigmoid() - 1
            return x.exp()

    assert body(Shrinks(), torch.randn(4, 6)) == [
        "if self.training:",
        "    x_2 = (x * 2).relu() + 1",
        "else:",
        "    x = (x * 3).sigmoid() - 1",
        "x = x_2 if self.training else x",
        "return x.exp()",
    ]


def test_two_branches_may_meet_where_nobody_reads_what_stood_between():
    class Meets(nn.Module):
        def forward(self, x):
            x = x.sin() if self.training else x.cos()
            x.exp()
            return x.tan() if self.training else x.abs()

    assert body(Meets(), torch.randn(4, 6)) == [
        "if self.training:",
        "    x_2 = x.sin()",
        "else:",
        "    x = x.cos()",
        "if self.training:",
        "    tan = x_2.tan()",
        "else:",
        "    magnitude = x.abs()",
        "return tan if self.training else magnitude",
    ]


def test_a_modules_variable_bound_in_one_mode_is_not_used_behind_it(tmp_path):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((6,), 2.0))
            self.shift = nn.Parameter(torch.ones(6))

        def forward(self, x):
            if self.training:
                x = torch.addcmul(self.shift, x, self.scale)
            return x * self.scale + self.shift

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Inner()])

        def forward(self, x):
            return self.blocks[0](x)

    model, x = Outer(), torch.randn(4, 6)
    package = compile_flat(model, (x,), devices="cpu*1", microbatches=2)
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    for training in (True, False):
        torch.testing.assert_close(pipe.train(training)(x), model.train(training)(x))


def test_a_variable_of_a_repeated_module_may_be_called_as_its_weight_is(tmp_path):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            weight = self.weight.exp()
            return (x @ weight).sin() + weight.sum()

    verified(
        lambda: nn.Sequential(Scale(), Scale()),
        lambda rows: {"input": torch.randn(rows, 6)},
        tmp_path,
    )


def test_a_repeated_module_may_be_called_in_one_mode_alone_at_times(tmp_path):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return self.linear(x).relu() * 0.5

    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.aux = Half(), Half(), Half()

        def forward(self, x):
            x = self.one(x)
            if self.training:
                return self.two(x), self.aux(x)
            return self.two(x)

    verified(Auxiliary, lambda rows: {"x": torch.randn(rows, 6)}, tmp_path)


@pytest.mark.parametrize("devices", ["cpu*2", "cpu*4"])
def test_the_models_dtype_is_read_off_what_has_it(devices, tmp_path):
    class Projection(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 6)

        def forward(self, x):
            return self.linear(x).relu() * 0.5

    class Time(nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = Projection()

        def forward(self, step):  # float32 whatever the model is, until it is projected
            angle = step[:, None].float().sin()
            return self.projection(angle.to(self.projection.linear.weight.dtype))

    class Times(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Time(), Time()

        def forward(self, step):
            return self.one(step) + self.two(step)

    verified(Times, lambda rows: {"step": torch.arange(rows)}, tmp_path, devices=devices)


def test_what_one_call_gives_has_a_variable_each_even_if_all_is_collected(tmp_path):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 12)

        def forward(self, x, caches):
            keys, values = self.linear(x).tanh().chunk(2, dim=1)
            caches.append({"keys": keys})
            return x + keys * values

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.cross = Attention(), Attention()

        def forward(self, x, inner, cross):
            return self.cross(self.inner(x, inner), cross)

    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            inner, cross = [], []
            for layer in self.layers:
                x = layer(x, inner, cross)
            return self.head(x), inner, cross

    verified(Caching, lambda rows: {"x": torch.randn(rows, 6)}, tmp_path, devices="cpu*1")


def test_what_every_call_of_a_loop_is_given_keeps_its_variable(tmp_path):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, hidden, read):
            return hidden + self.linear(hidden * read).tanh()

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(6, 6)
            self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

        def forward(self, x):
            hidden = self.encoder(x).exp()
            return self.decode(x * 2, hidden)

        def decode(self, x, read):
            hidden = x
            for layer in self.layers:
                hidden = layer(hidden, read)
            return hidden

    verified(Decoder, lambda rows: {"x": torch.randn(rows, 6)}, tmp_path, devices="cpu*1")


def test_the_beginning_of_an_expression_has_the_variable_of_its_line(tmp_path):
    """So its memory is given back when the model gives it back."""

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(6))
            self.query = nn.Linear(6, 6)

        def own_bias(self):
            return self.bias.exp()

        def forward(self, x):
            query = self.query(x)
            scores = query * 0.5 * query.size(1) + self.own_bias()
            query = query * 2 + self.own_bias() * query
            return scores.softmax(1) + query

    package = verified(Scores, lambda rows: {"x": torch.randn(rows, 6)}, tmp_path, devices="cpu*1")
    lines = [line.strip().partition("  #")[0] for line in package.files["stage_0.py"].splitlines()]
    assert "scores = query * 0.5 * 6" in lines
    assert "scores = scores + own_bias" in lines
    # The second line reads the query again, which has to stay.
    assert "query = product + own_bias * query" in lines


def test_a_line_of_the_users_is_told_once(tmp_path):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)

        def forward(self, x):
            return self.layer(x).tanh().mean(1).sigmoid().exp().log()

    def sequences(batch):
        return {"x": torch.randn(batch, 5, 6)}

    package = verified(Encoder, sequences, tmp_path, devices="cpu*1")
    assert package.files["stage_0.py"].count("return self.layer(x).tanh()") == 1


class Gated(nn.Module):
    """Values that are called as the variables of a loop are, read behind it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        i = self.gate(x).sigmoid()
        block = i + 1
        block_module = block.sin()
        for layer in self.blocks:
            x = layer(x)
        return (x * i + block) * block_module


def test_a_variable_of_a_loop_is_that_of_no_value(tmp_path):
    model, x = Gated(), torch.randn(4, 6)
    counters = set()
    for package in cut_everywhere(compile_flat(model, (x,), devices="cpu*2", microbatches=2)):
        pipe = fxpipe.load(package.write(tmp_path / str(package.plan.cuts[0])))
        pipe.load_state_dict(model.state_dict())
        torch.testing.assert_close(pipe(x), model(x))
        counters |= set(
            re.findall(r"for (\w+) in range\(.*\):$", "".join(package.files.values()), re.M)
        )
    assert counters == {"j"}


class Crosses(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, _, y):
        h = self.a(_).tanh()
        return h + y, self.b(h) * y


class Underscores(nn.Module):
    """Values that are called as what nobody reads is, and so is a list of modules."""

    def __init__(self):
        super().__init__()
        self.chunks = nn.Linear(6, 18)
        self._ = nn.ModuleList([Crosses(), Crosses(), Crosses()])

    def forward(self, _, _1):
        y = _ * 2 + _1
        for block in self._:
            _, y = block(_, y)
        _2 = _ + _1
        a, b, _unused = self.chunks(y).chunk(3, -1)
        return a.tanh() + b.sin() + _2 * _


def test_an_underscore_is_no_variable_that_is_read(tmp_path):
    model, inputs = Underscores(), (torch.randn(4, 6), torch.randn(4, 6))
    for package in cut_everywhere(compile_flat(model, inputs, devices="cpu*2", microbatches=2)):
        pipe = fxpipe.load(package.write(tmp_path / str(package.plan.cuts[0])))
        pipe.load_state_dict(model.state_dict())
        torch.testing.assert_close(pipe(*inputs), model(*inputs))
        for stage in package.manifest.stages:
            assert "_" not in {port.parameter for port in stage.inputs}
