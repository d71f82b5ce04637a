"""Repeated modules are classes, written once, and compute what the model does."""

import re

import pytest
import torch
from flat import compile_flat, cut_everywhere, verified
from torch import nn
from torch.nn import functional as F

import fxpipe


class Layer(nn.Module):
    """Two linear layers around an activation, dropout between, a residual."""

    def __init__(self, inner=8, dropout=0.1):
        super().__init__()
        self.up = nn.Linear(6, inner)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(inner, 6)

    def forward(self, x):
        y = self.dropout(F.relu(self.up(x)))
        return x + self.down(y)


class Layers(nn.Module):
    """So many layers, between two others."""

    def __init__(self, layers=4):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Round(torch.autograd.Function):
    """Rounds, with the gradient of a function that does not."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def rows(batch):
    return {"x": torch.randn(batch, 6)}


def images(batch):
    return {"x": torch.randn(batch, 4, 12, 12)}


def classes(package):
    """The code of each class in blocks.py."""
    _, *found = re.split(r"^class (\w+)", package.files.get("blocks.py", ""), flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))


def code(text):
    """Lines of code without comments."""
    lines = [line.split("  # ")[0].rstrip() for line in text.splitlines()]
    return [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]


def test_one_class_serves_all_stages(tmp_path):
    package = verified(Layers, rows, tmp_path)
    assert list(classes(package)) == ["Layer"]
    for j, place in enumerate(("for layer in self.layers:", "for layer in self.layers.values():")):
        stage = code(package.files[f"stage_{j}.py"])
        assert {"from .blocks import Layer", place, "x = layer(x)"} <= set(stage)


def test_the_code_does_not_grow_with_the_number_of_layers(tmp_path):
    def sizes(layers, folder):
        package = verified(lambda: Layers(layers), rows, folder)
        files = {name: text for name, text in package.files.items() if name.endswith(".py")}
        return {name: len(text.splitlines()) for name, text in files.items()}

    assert sizes(4, tmp_path / "4") == sizes(12, tmp_path / "12")


def test_what_is_equal_in_all_is_written_in_the_class_and_what_differs_is_an_argument(tmp_path):
    class Widths(Layers):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(inner) for inner in (8, 10, 12, 14))

    package = verified(Widths, rows, tmp_path)
    (layer,) = classes(package).values()
    assert "def __init__(self, out_features: int) -> None:" in layer
    assert "self.up = nn.Linear(6, out_features)" in layer
    assert "self.down = nn.Linear(out_features, 6)" in layer
    assert "for out_features in (8, 10)" in package.files["stage_0.py"]


def test_arguments_are_called_as_the_users_class_calls_them(tmp_path):
    class Window(nn.Module):
        def __init__(self, window):
            super().__init__()
            self.window = window
            self.mix = nn.Linear(6, 6)

        def forward(self, x):
            return x + self.mix(x.roll(self.window, 1))

    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(Window(k) for k in (1, 2, 3, 4)))

        def forward(self, x):
            return self.layers(x)

    package = verified(Windows, rows, tmp_path)
    (window,) = classes(package).values()
    assert "x.roll(self.window, 1)" in window
    assert "Window(window)" in package.files["stage_1.py"]


@pytest.mark.parametrize(
    ("combined", "name"),
    [
        (lambda x, y, scale: x + scale * y, "scale"),
        (lambda x, y, scale: x * 2 + scale * y, "number"),  # which of the two products it is
    ],
)
def test_a_factor_is_called_as_the_users_line_calls_it(combined, name):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, x, scale):
            return combined(x, self.mix(x), scale)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Scaled() for _ in range(3))

        def forward(self, x):
            for k, layer in enumerate(self.layers):
                x = layer(x, 1 / (k + 2))
            return x

    package = compile_flat(Net(), kwargs=rows(4), devices=1, microbatches=2)
    (scaled,) = classes(package).values()
    assert f"def __init__(self, {name}: float) -> None:" in scaled
    assert f" + self.{name} * mix" in scaled


def test_a_layer_whose_factor_is_one_is_of_the_class_of_the_others(tmp_path):
    class Fading(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, x, scale, whole=1.0):
            return x + scale * self.mix(x) * whole

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Fading() for _ in range(4))

        def forward(self, x):
            for k, layer in enumerate(self.layers):
                x = layer(x, 1 / (k + 1))
            return x

    package = verified(Net, rows, tmp_path, devices="cpu*1")
    (fading,) = classes(package).values()
    assert "4 times" in fading
    assert "return x + self.number * self.mix(x)  #" in fading


def test_an_input_of_a_layer_of_torch_is_called_as_its_forward_calls_it(tmp_path):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            layers = (nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(3))
            self.layers = nn.ModuleList(layers)

        def forward(self, x, padding, need_weights):  # which only looks like another's name
            for layer in self.layers:
                x = x + layer(x, x, x, key_padding_mask=padding, attn_mask=need_weights)[0]
            return x

    def given(batch):
        mask = torch.randn(5, 5)
        x, padding = torch.randn(batch, 5, 6), torch.randn(batch, 5)
        return {"x": x, "padding": padding, "need_weights": mask}

    package = verified(Attending, given, tmp_path, devices="cpu*1")
    (attention,) = classes(package).values()
    taken = re.findall(r"(\w+): Tensor", attention)
    assert taken == ["query", "key_padding_mask", "attn_mask"]
    assert "self.layers[2](x, padding, need_weights)" in package.files["stage_0.py"]


def test_an_input_is_called_as_the_parameter_that_it_is_whatever_the_line_reads_first(tmp_path):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, x, gate, others):
            return self.mix(gate) * x + torch.cat(others, dim=1).mean()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Gated() for _ in range(4))

        def forward(self, x):
            first = [x, x + 1]
            for layer in self.layers:
                flipped = x.flip(1)
                x = layer(x, flipped, first)
            return x

    package = verified(Net, rows, tmp_path, devices="cpu*1")
    (gated,) = classes(package).values()
    assert "def forward(self, x: Tensor, gate: Tensor, others: list[Tensor]) -> Tensor:" in gated
    assert "self.mix(gate) * x" in gated


def test_arguments_that_a_comprehension_reads_keep_their_names(tmp_path):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 12)
            self.out = nn.Linear(6, 6)

        def forward(self, query, scale):
            left, right = (self.out(half) for half in self.mix(query).chunk(2, dim=1))
            return left.exp() + right * scale

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Heads() for _ in range(4))

        def forward(self, x):
            scale = x.mean(1, keepdim=True)
            for layer in self.layers:
                x = layer(x, scale)
            return x

    package = verified(Net, rows, tmp_path, devices="cpu*1")
    (heads,) = classes(package).values()
    assert "def forward(self, query: Tensor, scale: Tensor) -> Tensor:" in heads


def test_a_variant_is_called_by_what_only_it_has(tmp_path):
    class Residual(nn.Module):
        def __init__(self, downsample):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.downsample = nn.Conv2d(4, 4, 1) if downsample else None

        def forward(self, x):
            y = F.relu(self.conv(x))
            return y + (x if self.downsample is None else self.downsample(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(Residual(k % 2 == 1) for k in range(4)))

        def forward(self, x):
            return self.layers(x).mean((2, 3))

    package = verified(Net, images, tmp_path, devices="cpu*1")
    assert list(classes(package)) == ["Residual", "ResidualWithDownsample"]


def test_results_of_every_layer_are_collected_in_a_list(tmp_path):
    class States(Layers):
        def forward(self, x):
            states = []
            for layer in self.layers:
                x = layer(x)
                states.append(x)
            return self.last(x), states

    package = verified(States, rows, tmp_path, devices="cpu*1")
    lines = code(package.files["stage_0.py"])
    start = lines.index("for layer in self.layers:")
    assert lines[start - 1].endswith(" = []")
    assert lines[start + 1] == "x = layer(x)"
    assert lines[start + 2].endswith(".append(x)")


def test_of_a_layer_in_a_loop_a_result_that_is_wanted_alone_is_taken_alone(tmp_path):
    class Weighing(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, x):
            weights = torch.softmax(self.mix(x), 1)
            return x * weights, weights

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Weighing() for _ in range(4))

        def forward(self, x):
            x, first = self.layers[0](x)
            for layer in self.layers[1:]:
                x, _ = layer(x)
            return x, first

    package = verified(First, rows, tmp_path, devices="cpu*1")
    lines = code(package.files["stage_0.py"])
    start = lines.index("for layer in self.layers[1:4]:")
    assert lines[start - 1] == "weights, x = self.layers[0](x)"
    assert lines[start + 1] == "x = layer(x)[1]"


def test_lists_that_grow_are_lists_that_grow(tmp_path):
    class Dense(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.mix = nn.Linear(width, 2)

        def forward(self, features):
            return torch.tanh(self.mix(torch.cat(features, 1)))

    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Dense(6 + 2 * k) for k in range(5))

        def forward(self, x):
            features = [x]
            for layer in self.layers:
                features.append(layer(features))
            return torch.cat(features, 1)

    package = verified(Growing, rows, tmp_path, devices="cpu*1")
    lines = code(package.files["stage_0.py"])
    start = lines.index("features = [x]")
    assert lines[start + 1] == "features.append(self.layers[0](features))"
    assert "def forward(self, features: list[Tensor]) -> Tensor:" in package.files["blocks.py"]


def test_a_list_grows_in_each_stage_from_what_it_is_given_on(tmp_path):
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6 + 4 * k, 4) for k in range(6))
            self.head = nn.Linear(30, 3)

        def forward(self, x):
            features = [x]
            for layer in self.layers:
                features.append(layer(torch.cat(features, 1)).relu())
            return self.head(torch.cat(features, 1))

    model, x = Dense(), torch.randn(8, 6)
    texts = []
    for package in cut_everywhere(compile_flat(model, (x,), devices="cpu*2", microbatches=2)):
        pipe = fxpipe.load(package.write(tmp_path / str(package.plan.cuts[0])))
        pipe.load_state_dict(model.state_dict())
        torch.testing.assert_close(pipe(x), model(x))
        texts += code(package.files["stage_1.py"])
    assert "features = [x, relu, layer.relu()]" in texts


def test_a_layer_that_a_cut_divides_is_written_out(tmp_path):
    package = verified(lambda: Layers(3), rows, tmp_path)
    assert list(classes(package)) == ["Layer"]
    written = [name for name, text in package.files.items() if ".up(" in text]
    assert sorted(written) == ["blocks.py", "stage_0.py"]


def test_whole_layers_beside_a_divided_one_are_made_in_one_line(tmp_path):
    package = verified(lambda: Layers(9), rows, tmp_path)
    assert "self.layers.update({str(i): Layer() for i in range(4)})" in package.files["stage_0.py"]
    assert (
        "self.layers.update({str(i): Layer() for i in range(5, 9)})"
        in (package.files["stage_1.py"])
    )


def test_an_activation_that_blocks_share_is_in_each_of_them(tmp_path):
    class Block(nn.Module):
        def __init__(self, act):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 6), act, nn.Linear(6, 6))
            self.act = act

        def forward(self, x):
            return x + self.act(self.body(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            act = nn.ReLU()
            self.layers = nn.Sequential(*(Block(act) for _ in range(6)))

        def forward(self, x):
            return self.layers(x)

    package = verified(Net, rows, tmp_path)
    (block,) = classes(package).values()
    assert block.count("nn.ReLU()") == 2
    assert "layers.*" in block


def test_a_module_that_is_called_twice_is_one_module(tmp_path):
    class Twice(Layers):
        def forward(self, x):
            layer = self.layers[0]
            return self.last(layer(layer(self.first(x))))

    package = verified(Twice, rows, tmp_path, devices="cpu*1")
    assert code(package.files["stage_0.py"]).count("self.layers = nn.ModuleList([Layer()])") == 1
    assert package.files["stage_0.py"].count("Layer()") == 1


def test_a_sequential_is_called_as_one_in_all_its_calls_or_in_none(tmp_path):
    class InVain(nn.Module):
        """Nobody reads the second result, but its dropout has drawn."""

        def __init__(self):
            super().__init__()
            self.head = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2))
            self.last = nn.Linear(6, 6)

        def forward(self, x):
            x = self.head(x)
            self.head(x)
            return self.last(x)

    made = compile_flat(InVain(), (torch.randn(8, 6),), devices="cpu*2", microbatches=2)
    for package in cut_everywhere(made):
        pipe = fxpipe.load(package.write(tmp_path / str(package.plan.cuts[0])))
        assert pipe.state_dict().keys() == InVain().state_dict().keys()


def test_a_loop_goes_over_a_list_in_its_order_whatever_is_called_before(tmp_path):
    class Early(Layers):
        def forward(self, x):
            return super().forward(self.layers[1](x))

    package = verified(Early, rows, tmp_path, devices="cpu*1")
    assert "self.layers = nn.ModuleList(Layer() for _ in range(4))" in package.files["stage_0.py"]


def test_a_module_with_two_names_is_of_a_class(tmp_path):
    class Shared(Layers):
        def __init__(self):
            super().__init__()
            self.shared = self.layers[1]

        def forward(self, x):
            return super().forward(self.shared(x))

    package = verified(Shared, rows, tmp_path, devices="cpu*1")
    assert list(classes(package)) == ["Layer"]


def test_layers_that_call_a_function_of_the_users_are_of_a_class(tmp_path):
    class Rounding(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, x):
            return x + Round.apply(self.mix(x))

    class Net(Layers):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Rounding() for _ in range(4))

    package = verified(Net, rows, tmp_path, devices="cpu*1")
    assert list(classes(package)) == ["Rounding"]


def test_frozen_parameters_stay_frozen(tmp_path):
    class Frozen(Layers):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                layer.up.weight.requires_grad_(False)

    package = verified(Frozen, rows, tmp_path)
    assert "self.up.weight.requires_grad_(False)" in package.files["blocks.py"]
    pipe = fxpipe.load(tmp_path / "out")
    trained = {name: p.requires_grad for name, p in pipe.named_parameters()}
    assert [name for name in trained if not trained[name]] == [
        f"layers.{k}.up.weight" for k in range(4)
    ]


def test_tied_layers_are_tied_where_they_are_used(tmp_path):
    class Tied(Layers):
        def __init__(self):
            super().__init__()
            self.layers[3].up.weight = self.layers[0].up.weight

    package = verified(Tied, rows, tmp_path, devices="cpu*1")
    assert "= self.layers[0].up.weight  # tied" in package.files["stage_0.py"]
    verified(Tied, rows, tmp_path / "two")


def test_what_one_mode_runs_stands_below_an_if(tmp_path):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, x):
            x = self.mix(x)
            if self.training:
                x = x * 2 - 1
            return x.relu()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Noisy() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    package = verified(Net, rows, tmp_path)
    (noisy,) = classes(package).values()
    assert "if self.training:" in code(noisy)


def test_several_results_and_values_from_outside(tmp_path):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, left, right, *, shift):
            left, right = self.mix(left) + shift, right - left
            return left, right

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Pair() for _ in range(4))

        def forward(self, x):
            left, right = x, 2 * x
            shift = x.mean(1, keepdim=True)
            for layer in self.layers:
                left, right = layer(left, right, shift=shift)
            return left + right

    package = verified(Net, rows, tmp_path)
    (pair,) = classes(package).values()
    assert "self, left: Tensor, right: Tensor, shift: Tensor" in pair
    assert "left, right = layer(left, right, shift)" in code(package.files["stage_0.py"])


def test_a_class_reads_sizes_off_what_it_is_given(tmp_path):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, x):
            batch, channels, height, width = x.shape
            y = x.flatten(2).transpose(1, 2)
            y = self.mix(y).view(batch, height, width, channels)
            return x + y.permute(0, 3, 1, 2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.halve = nn.ModuleList(nn.Conv2d(4, 4, 3, 2, 1) for _ in range(3))

        def forward(self, x):
            for block, halve in zip(self.blocks, self.halve, strict=True):
                x = halve(block(x))
            return x.mean((2, 3))

    package = verified(Net, images, tmp_path, devices="cpu*1")
    (block,) = classes(package).values()
    assert "batch, _, height, width = x.shape" in code(block)
    assert ".view(batch, height, width, 4)" in block


@pytest.mark.parametrize("number", [2, 3])
def test_numbers_of_one_module_that_differ_from_call_to_call_are_no_settings(tmp_path, number):
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, x, times):
            return self.mix(x) * times

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Counted() for _ in range(2))

        def forward(self, x):
            for k in range(number):
                x = self.layers[0](x, k + 2)
            return self.layers[1](x, 5)

    verified(Net, rows, tmp_path)


def test_a_class_for_tensors_of_different_rank_returns_a_tensor(tmp_path):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return x * self.weight + 1

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Scale() for _ in range(2))

        def forward(self, x):
            return self.layers[1](self.layers[0](x)[:, None]).sum(1)

    package = verified(Net, rows, tmp_path, devices="cpu*1")
    assert "def forward(self, x: Tensor) -> Tensor:" in package.files["blocks.py"]


def test_layers_before_an_op_that_fixes_a_size_are_of_one_class_with_those_after_it(tmp_path):
    class Masked(nn.Module):
        def __init__(self, fixes):
            super().__init__()
            self.mix = nn.Linear(6, 6)
            self.fixes = fixes

        def forward(self, x):
            length = x.size(1)
            x = self.mix(x) * torch.ones(length, 1)
            return x.reshape(-1, 4, 6) if self.fixes else x.reshape(-1, length, 6)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Masked(fixes=k == 1) for k in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.sum(1)

    def sequences(batch):
        return {"x": torch.randn(batch, 4, 6)}

    package = verified(Net, sequences, tmp_path, devices="cpu*1")
    assert len(classes(package)) == 1
