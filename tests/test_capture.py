"""Capture: the graph has the model's own names, computes what the model does, or says why not."""

import random

import models
import pytest
import torch
from flat import compile_flat, verified
from torch import nn
from torch.compiler import is_exporting
from torch.distributions import Distribution, Normal, kl_divergence
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

import fxpipe
from fxpipe.capture import capture, dynamo
from fxpipe.capture.check import Check
from fxpipe.errors import CaptureError, InputError
from fxpipe.ops.interpret import by_mode
from fxpipe.target import Target
from fxpipe.verify import verify


def targets(captured):
    return [str(node.target) for node in captured.graph.nodes if node.op == "call_module"]


def test_stock_modules_are_called_under_their_own_paths():
    captured = capture(models.Norms(), (torch.randn(4, 3, 8, 8),), {})
    assert targets(captured) == ["conv", "bn", "relu", "head"]
    assert captured.checked == "train and eval"


def test_a_transposed_convolution_is_called_as_such_unless_it_is_told_a_size():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 4, [2, 2], stride=[2, 2])
            self.odd = nn.ConvTranspose2d(4, 4, 3, stride=2)

        def forward(self, x):
            return self.odd(self.up(x), output_size=(18, 18))

    graph = capture(Grows(), (torch.randn(4, 3, 4, 4),), {}).graph
    called = [node.target for node in graph.nodes if node.op.startswith("call_")]
    assert called == ["up", torch.conv_transpose2d]


def test_a_bag_of_embeddings_is_called_as_such_unless_it_is_given_weights():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.weighted = (nn.EmbeddingBag(9, 4, mode="sum") for _ in range(2))

        def forward(self, ids, weights):
            return self.plain(ids) + self.weighted(ids, per_sample_weights=weights)

    captured = capture(Bags(), (torch.randint(9, (4, 3)), torch.rand(4, 3)), {})
    assert targets(captured) == ["plain"]


def test_shapes_are_expressions_in_the_batch():
    class Folded(nn.Module):
        def forward(self, x):
            return x.view(x.size(0) * 2, 3)

    captured = capture(Folded(), (torch.randn(4, 6),), {})
    (output,) = captured.outputs
    assert str(captured.specs[output]) == "float32[2 * batch, 3]"
    assert captured.specs[output].sizes({"batch": 5}) == (10, 3)


def test_a_batch_of_one_is_not_taken_for_a_constant():
    captured = capture(models.Chain(), (torch.randn(1, 6),), {})
    assert captured.specs[captured.outputs[0]].shape == ("batch", 6)


def test_train_and_eval_stay_open_where_they_were_written_as_functions():
    captured = capture(models.Norms(), (torch.randn(4, 3, 8, 8),), {})
    (dropout,) = (node for node in captured.graph.nodes if node.target is F.dropout)
    flag = dropout.args[2]
    assert captured.literals[flag.name] == "self.training"


def test_attention_dropout_is_zero_in_eval():
    class Attention(nn.Module):
        def forward(self, x):
            p = 0.5 if self.training else 0.0
            return F.scaled_dot_product_attention(x, x, x, dropout_p=p)

    captured = capture(Attention(), (torch.randn(3, 2, 4, 8),), {})
    assert "0.5 if self.training else 0.0" in captured.literals.values()
    assert captured.checked == "train and eval"


class Writer(nn.Module):
    """Torch's own transformer, with masks that it would look at to see whether they are causal."""

    def __init__(self):
        super().__init__()
        reader = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        writer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
        self.words = nn.Embedding(11, 8)
        self.reader = nn.TransformerEncoder(reader, 2, enable_nested_tensor=False)
        self.writer = nn.TransformerDecoder(writer, 2)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        words = self.words(x)
        read = self.reader(words, self.mask, x == 0)
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=words.dtype)
        return self.writer(words, read, tgt_mask=mask)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_torchs_own_transformer_is_captured_with_its_masks(tmp_path):
    verified(Writer, lambda rows: {"x": torch.randint(1, 11, (rows, 5))}, tmp_path)


def test_the_models_own_dtype_stays_open_and_a_written_one_does_not():
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            zeros = torch.zeros(3, dtype=x.dtype)
            x = self.layer(x)
            return zeros + x.to(torch.float32) + x.to(self.layer.weight.dtype)

    captured = capture(Casts(), (torch.randn(4, 3),), {})
    zeros, to, own = (n for n in captured.graph.nodes if n.target in (torch.zeros, "to"))
    assert [str(part) for part in zeros.kwargs["dtype"].args] == ["x", "dtype"]
    assert to.args[1] == torch.float32
    assert captured.literals[own.args[1].name] == "dtype"


class Variational(models.Chain):
    """Its distributions would look at their arguments' values, a branch that nobody can trace."""

    def forward(self, x):
        posterior = Normal(self.layers[:2](x), self.layers[2:](x).exp())
        prior = Normal(torch.zeros_like(x), torch.ones_like(x))
        return posterior.rsample(), kl_divergence(posterior, prior).sum(-1)


def test_distributions_are_captured_and_check_their_arguments_again_afterwards(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch.compile leaves it off
    verified(Variational, rows, tmp_path)
    with pytest.raises(ValueError, match="scale"):
        Normal(torch.zeros(1), -torch.ones(1))


def rows(batch, dtype=torch.float32):
    return {"x": torch.randn(batch, 6, dtype=dtype)}


class Root(models.Chain):
    """Asks for its dtype, as norms do that compute in float32 at least."""

    def forward(self, x):
        x = self.layers[:2](x)
        wide = x if x.dtype == torch.float64 else x.float()
        return self.layers[2:](wide * wide.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt())


def test_ops_that_depend_on_the_models_dtype_are_for_that_one_alone(tmp_path):
    package = compile_flat(Root(), kwargs=rows(8), devices=2, microbatches=4)
    assert package.capture.checked == "train and eval, in float32 alone"
    target = Target("Root", __file__, str(tmp_path), Root, rows)
    out = package.write(tmp_path / "out")
    with pytest.raises(InputError, match=r"float64 than in float32.*verify with --dtype float32"):
        verify(out, target)
    result = verify(out, target, dtype="float32")
    assert [difference.group for difference in result.differences][-1] == "eval(): outputs"
    assert result.equal, result


class Single(models.Chain):
    """Takes no float64, in which it would be seen what `torch.float32` stands for."""

    def forward(self, x):
        if x.dtype == torch.float64:
            raise ValueError("float32 only")
        return self.layers(x * 2).float().sin()


def test_where_dtypes_could_not_be_told_the_graph_is_for_one_alone():
    assert capture(Single(), (), rows(8)).checked == "train and eval, in float32 alone"


class Rotary(models.Chain):
    """Llama's rotations: a plain attribute, which `model.to(dtype)` leaves alone."""

    def __init__(self):
        super().__init__()
        self.rotations = torch.polar(torch.ones(3), torch.arange(3) * 0.7)
        self.register_buffer("scale", torch.full((6,), 0.3), persistent=False)

    def forward(self, x):
        x = self.layers[:2](x)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (3, 2)))
        rotated = torch.view_as_real(pairs * self.rotations).flatten(-2)
        return self.layers[2:](rotated.type_as(x) * self.scale)


def test_another_dtype_reaches_what_it_reaches_in_the_model(tmp_path):
    verified(Rotary, rows, tmp_path)  # in float64
    model, pipe = Rotary(), fxpipe.load(tmp_path / "out")
    pipe.load_state_dict(model.state_dict())
    pipe.to(torch.bfloat16), model.to(torch.bfloat16)
    for found, expected in [(pipe.rotations, model.rotations), (pipe.scale, model.scale)]:
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    x = torch.randn(8, 6, dtype=torch.bfloat16)
    torch.testing.assert_close(pipe(x), model(x))


def test_limits_of_the_models_dtype_stay_open():
    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            low = torch.finfo(self.layer.weight.dtype).min
            x = self.layer(x)
            x = torch.where(x > 0, x, low)
            return F.dropout(x.softmax(-1), 0.5, self.training)

    captured = capture(Masks(), (torch.randn(4, 3),), {})
    assert "torch.finfo(dtype).min" in captured.literals.values()
    assert captured.checked == "train and eval"


class OwnModes(models.Norms):
    """The batch norm stays in eval mode, the dropout in train mode."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def train(self, mode=True):
        super().train(mode)
        self.bn.eval()
        self.dropout.train()
        return self

    def forward(self, x):
        return self.dropout(super().forward(x))


def test_a_module_that_keeps_its_mode_keeps_it_in_the_package(tmp_path):
    package = verified(OwnModes, lambda rows: {"x": torch.randn(rows, 3, 4, 4)}, tmp_path)
    assert not any(stage.mutated_buffers for stage in package.manifest.stages)


def test_ops_that_one_mode_alone_runs_are_marked_with_it():
    captured = capture(models.Paths(), (torch.randn(4, 6),), {})
    assert captured.checked == "train and eval"
    modes = {op: node.meta.get("mode") for node in captured.graph.nodes for op in [node.name]}
    assert modes["rand"] is True
    assert modes["relu"] is False
    assert [node.target for node in captured.graph.nodes].count(by_mode) == 2


def test_a_mode_is_told_apart_however_small_its_effect():
    class Faint(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            y = self.layer(x) * 1e-6
            if self.training:
                y = y * torch.empty(y.size(0), 1).bernoulli_(0.5)
            return x + y

    captured = capture(Faint(), (torch.randn(4, 6),), {})
    assert [node.target for node in captured.graph.nodes].count(by_mode) == 1


def test_what_only_eval_mode_computes_is_left_out_where_it_can_not_be_checked(
    tmp_path, monkeypatch
):
    run = Check._captured

    def failing(self, training, hook):
        if not training:
            raise RuntimeError("as where a size is another one in eval mode")
        return run(self, training, hook)

    monkeypatch.setattr(Check, "_captured", failing)
    package = compile_flat(models.Auxiliary(), (torch.randn(8, 6),), devices=2, microbatches=2)
    assert package.capture.checked == "train"
    assert not any("self.post(" in text for text in package.files.values())
    assert "train" not in package.manifest.output_structure
    fxpipe.load(package.write(tmp_path / "out")).train()(torch.randn(8, 6))


class Stops(models.Chain):
    """Where gradients stop hangs on the mode, in these ways; the outputs never do."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        x = self.layers[:2](x)
        if self.way == "in train" and self.training:
            with torch.no_grad():
                scale = self.layers[2].weight.exp().mean()
        else:
            scale = self.layers[2].weight.exp().mean()
        if self.way == "in eval":
            with torch.set_grad_enabled(self.training):
                x = x.sin()
        if self.way == "detached in eval":
            x = x if self.training else x.detach()
        return self.layers[2:](x * scale)


@pytest.mark.parametrize("way", ["in train", "in eval", "detached in eval"])
def test_gradients_in_eval_mode_are_the_models(tmp_path, way):
    model = Stops(way)
    package = compile_flat(model, kwargs=rows(8), devices=2, microbatches=4)
    pipe = fxpipe.load(package.write(tmp_path / "out")).double().eval()
    pipe.load_state_dict(model.double().eval().state_dict())
    for module in (model, pipe):
        torch.manual_seed(0)
        module(**rows(8, torch.float64)).square().sum().backward()
    for name, parameter in model.named_parameters():
        found = pipe.get_parameter(name).grad
        assert (found is None) == (parameter.grad is None), name
        assert found is None or torch.allclose(found, parameter.grad, rtol=1e-12), name


def test_modes_with_equal_ops_are_told_apart_by_how_arguments_are_nested():
    class Indices(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, x):
            y = self.mix(x)
            rows, scale = y.sum(1), y.sum(0)
            if self.training:
                y = y + rows[:, None]
            return y * scale[None, :]

    captured = capture(Indices(), (torch.randn(8, 6),), {})
    assert captured.checked == "train and eval"


def test_another_output_in_eval_mode_is_captured_too():
    class Auxiliary(models.Chain):
        def forward(self, x):
            y = self.layers(x)
            return (y, y * 2) if self.training else y

    assert capture(Auxiliary(), (torch.randn(4, 6),), {}).checked == "train and eval"


def forward_of(function):
    return type("Model", (models.Chain,), {"forward": function})()


def test_inputs_may_be_positional_alone_and_any_number():
    def forward(self, x, /, y, *rest, scale=1):
        return self.layers(x + y) * rest[0] + rest[1] * scale

    x = torch.randn(4, 6)
    captured = capture(forward_of(forward), (x, x, x, x), {"scale": 2})
    assert captured.signature == ("x", "y", "*rest", "scale")
    assert [given.name for given in captured.inputs] == ["x", "y", "rest_0", "rest_1"]


def test_the_batch_is_that_of_the_first_input_with_more_than_one_row():
    def forward(self, positions, step, x):
        return self.layers(x + positions + step)

    inputs = (torch.ones(1, 6), torch.tensor(3), torch.randn(4, 6))
    captured = capture(forward_of(forward), inputs, {})
    assert [given.batched for given in captured.inputs] == [False, False, True]
    assert captured.batch == 4


@pytest.mark.parametrize("shape", [(4, 3), (1, 3), ()], ids=str)
def test_an_input_may_be_read_by_nobody(shape):
    class Ignores(models.Chain):
        def forward(self, x, other):
            return self.layers(x)

    captured = capture(Ignores(), (torch.randn(4, 6), torch.randn(shape)), {})
    assert captured.checked == "train and eval"
    assert [str(node) for node in captured.graph.nodes if node.op == "placeholder"][1] == "other"


def test_an_output_that_changes_with_the_batch_and_is_no_tensor_is_refused():
    model = forward_of(lambda self, x: {"y": self.layers(x), "rows": len(x)})
    with pytest.raises(CaptureError, match=r"output\['rows'\] is 4 with one batch and 5"):
        capture(model, (torch.randn(4, 6),), {})


def test_a_weight_first_is_told_as_what_the_batch_was_taken_from():
    model = forward_of(lambda self, scale, x: self.layers(x * scale))
    with pytest.raises(CaptureError, match="taken to be 6"):
        capture(model, (torch.ones(6), torch.randn(4, 6)), {})


def test_what_ops_write_and_draw_is_seen_on_real_data():
    ops = capture(models.Norms(), (torch.randn(4, 3, 8, 8),), {}).ops
    by_module = {op.module: op for op in ops.values()}
    assert set(by_module["bn"].mutates) == {
        "self.bn.running_mean",
        "self.bn.running_var",
        "self.bn.num_batches_tracked",
    }
    assert by_module["relu"].mutates == (by_module["bn"].name,)
    assert by_module["relu"].storage == by_module["bn"].name
    assert [op.source.text for op in ops.values() if op.random] == [
        "x = F.dropout(x, 0.25, self.training)"
    ]


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_attention_draws_only_with_dropout(p):
    class Attention(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, dropout_p=p if self.training else 0.0)

    ops = capture(Attention(), (torch.randn(3, 2, 4, 8),), {}).ops
    assert any(op.random for op in ops.values()) is (p > 0)


def test_ops_carry_the_users_line():
    captured = capture(models.Skip(), (torch.randn(4, 6),), {})
    source = captured.ops[captured.outputs[0]].source
    assert source.file == "models.py"
    assert source.text == "return self.last(torch.cat([x, skip], dim=1))"


def test_ties_are_named_by_the_module_that_uses_them():
    captured = capture(models.Tied(), (torch.randint(11, (4, 5)),), {})
    assert captured.aliases == {"head.weight": "embed.weight"}
    assert targets(captured)[-1] == "head"


def test_nested_inputs_constants_and_dataclasses_keep_their_structure():
    pair = (torch.randn(4, 6), torch.randn(4, 6))
    captured = capture(models.Structured(), (pair,), {"weight": torch.randn(6), "negate": True})
    assert [(given.name, given.batched) for given in captured.inputs] == [
        ("pair_0", True),
        ("pair_1", True),
        ("weight", False),
    ]
    assert captured.signature == ("pair", "weight", "negate")
    assert captured.output_structure["class"] == "models:Answer"
    assert captured.state.keys() - captured.saved == {"mask", "table"}


def test_inputs_with_awkward_or_equal_names_are_told_apart():
    class Awkward(nn.Module):
        def forward(self, input, input_0, id):
            return input[0] + input_0 * id

    x = torch.randn(4, 6)
    captured = capture(Awkward(), ((x,), x * 2, x * 3), {})
    names = [given.name for given in captured.inputs]
    assert len(set(names)) == 3
    assert names == [node.name for node in captured.graph.nodes if node.op == "placeholder"]


def test_the_model_is_left_as_it_was():
    model = models.Norms().eval()
    model.conv.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    capture(model, (torch.randn(4, 3, 8, 8, generator=torch.Generator()),), {})
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert (model.training, model.conv.training, model.bn.training) == (False, True, False)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_a_forward_prints_is_no_hindrance():
    class Talks(models.Chain):
        def forward(self, x):
            print("hello")
            return self.layers(x)

    capture(Talks(), (torch.randn(4, 6),), {})


def test_a_tensor_is_unpacked_by_one_op_whose_backward_is_one():
    class Heads(nn.Module):
        def forward(self, x):
            query, key = x.unflatten(1, (2, 3)).transpose(0, 1)
            for row in query.T:
                key = key * row[:, None]
            return key

    captured = capture(Heads(), (torch.randn(4, 6),), {})
    words = [str(node.target) for node in captured.graph.nodes if node.op == "call_method"]
    assert words == ["unflatten", "transpose", "unbind", "unbind"]
    assert captured.checked == "train and eval"


def test_an_item_of_what_a_stock_module_returns_is_not_all_of_it():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.pool = nn.Linear(6, 6), nn.MaxPool1d(2, return_indices=True)

        def forward(self, x):
            values, _ = self.pool(self.layer(x))
            return values

    captured = capture(Pooled(), (torch.randn(4, 6),), {})
    assert targets(captured) == ["layer"]
    assert captured.checked == "train and eval"


def test_checkpoint_regions_are_opened():
    class Checkpointed(models.Chain):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)

    class InSegments(models.Chain):
        def forward(self, x):
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    for model in (Checkpointed(), InSegments()):
        captured = capture(model, (torch.randn(4, 6),), {})
        assert targets(captured) == [f"layers.{k}" for k in range(4)]


def test_what_a_library_calls_only_while_traced_becomes_what_it_calls_otherwise():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        vocab_size=20,
        use_cache=False,
    )
    model = transformers.MixtralForCausalLM(config)
    captured = capture(model, (torch.randint(20, (4, 5)),), {})
    called = [node.target for node in captured.graph.nodes]
    assert called.count(F.grouped_mm) == 2


class Branch(models.Chain):
    def forward(self, x):
        if x.sum() > 0:
            x = x * 2
        return self.layers(x)


class Frozen(models.Chain):
    def forward(self, x):
        return self.layers(x).view(4, 6)


class ListsRows(models.Chain):
    def forward(self, x):
        rows = list(self.layers(x))
        return torch.stack([row * len(rows) for row in rows])


class ThreeOfThree(models.Chain):
    """Positions are of three kinds, and there are as many rows."""

    def forward(self, mask, positions, x):
        angles = positions.expand(3, -1).sum(0)
        x = self.layers(x.double().float())
        return x * angles + mask


class Kinds(models.Chain):
    """Positions are [3, batch, 6]."""

    def forward(self, x, positions):
        return self.layers(x) * positions.sum(0)


library = torch.library.Library("tests", "FRAGMENT")
library.define("twice(Tensor x) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")


class Foreign(models.Chain):
    def forward(self, x):
        return torch.ops.tests.twice(self.layers(x))


class PythonDraws(nn.Module):
    def forward(self, x):
        return x * random.uniform(0.5, 1.0)


class PythonPaths(models.Chain):
    def forward(self, x):
        return self.layers(x if random.random() < 0.5 else -x)


class Padded(nn.Module):
    def forward(self, x):
        lengths = torch.full((len(x),), 3)
        return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True).data


class NewBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x):
        self.total = self.total + x.detach().sum(0)
        return x * self.total


class WritesItsWeight(nn.Module):
    """Its own gradient needs the weight as it was."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.doubled = False

    def forward(self, x):
        if self.doubled != self.training:
            with torch.no_grad():
                self.second.weight.mul_(2.0 if self.training else 0.5)
            self.doubled = self.training
        return self.second(self.first(x).relu())


class Along(models.Chain):
    def forward(self, x):
        x = self.layers(x)
        return torch.take_along_dim(x, x.argsort(1)[:, :1], 1)


class Products(models.Chain):
    def forward(self, x):
        return torch.linalg.multi_dot([self.layers(x), torch.eye(6), torch.eye(6)])


class Quantized(models.Chain):
    def forward(self, x):
        return torch.fake_quantize_per_tensor_affine(self.layers(x), 0.1, 0, -128, 127)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            Branch(),
            [
                "test_capture.py",
                "if x.sum() > 0:",
                "path does not depend on the values",
                "allow-graph-breaks",
            ],
        ),
        (Frozen(), ["one batch size only", "view(4, 6)", "x.size(0)"]),
        (
            ListsRows(),
            [
                "one batch size only",
                "rows = list(self.layers(x))",
                "(`list(x)`)",
                "--allow-graph-breaks",
            ],
        ),
        (
            Along(),
            [
                "torch traces take_along_dim for one batch size only",
                "return torch.take_along_dim(x",
                "torch.gather",
                "--allow-graph-breaks",
            ],
        ),
        (Products(), ["torch traces multi_dot for one batch size only", "by @"]),
        (WritesItsWeight(), ["writes the parameter 'second.weight'", "outside of forward"]),
        (PythonDraws(), ["Python's random module", "torch.rand(())"]),
        (PythonPaths(), ["Python's random module", "torch.rand(())", "random.random() < 0.5"]),
        (
            Quantized(),
            [
                "torch can't trace the operator aten.fake_quantize_per_tensor_affine",
                "return torch.fake_quantize_per_tensor_affine(self.layers(x)",
                "autograd.Function",
                "--allow-graph-breaks",
            ],
        ),
        (Foreign(), ["'tests::twice'", "torch alone", "torch.ops.tests.twice(self.layers(x))"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_captured_names_the_line_and_the_way_out(model, says):
    with pytest.raises(CaptureError) as error:
        capture(model, (torch.randn(4, 6),), {})
    assert all(words in str(error.value) for words in says), str(error.value)


def test_of_several_inputs_with_a_frozen_batch_the_line_is_that_which_froze_it():
    with pytest.raises(CaptureError, match=r"batch size only, .*positions\.expand") as error:
        capture(ThreeOfThree(), (torch.randn(3, 1), torch.randn(3, 6), torch.randn(3, 6)), {})
    assert len(str(error.value.__cause__).split("User stack:")) > 2


def test_a_batch_frozen_by_an_input_that_has_it_elsewhere_is_told_how_to_give_that(monkeypatch):
    monkeypatch.setattr(dynamo, "_EFFORT", -1)  # the model is too much for other symbols
    with pytest.raises(CaptureError) as error:
        capture(Kinds(), (torch.randn(4, 6), torch.randn(3, 4, 6)), {})
    first, *_, last = str(error.value).splitlines()
    assert "one batch size only" in first
    assert "positions.sum(0)" in first
    assert last.startswith("If positions has the batch in dimension 1: give it as [batch, 3, 6]")


def test_hints_are_about_the_model_not_about_torch():
    with pytest.raises(CaptureError, match="Avoid calling the function") as error:
        capture(Padded(), (torch.randn(4, 6),), {})
    assert "torch._dynamo" not in str(error.value)
    assert "values of its tensors" not in str(error.value)


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((torch.randn(4, 5),), {}, ["Chain.forward fails on these inputs", "shapes"]),
        (
            (),
            {"y": torch.randn(4, 6)},
            ["don't fit Chain.forward(x", "missing a required argument: 'x'"],
        ),
        ((3.0,), {}, ["no input is a tensor with a batch dimension"]),
        (torch.randn(4, 6), {}, ["are one Tensor", "(x,)"]),
        ({"x": torch.randn(4, 6)}, {}, ["are one dict", "a dict behind it"]),
    ],
)
def test_inputs_that_do_not_fit_are_refused(args, kwargs, says):
    with pytest.raises(InputError) as error:
        capture(models.Chain(), args, kwargs)
    assert all(words in str(error.value) for words in says), str(error.value)


def test_a_model_that_cannot_be_trained_by_itself_is_told_so():
    class Overwritten(models.Chain):
        def forward(self, x):
            x = self.layers(x).relu()
            x += 1
            return x

    with pytest.raises(InputError, match="can't be trained on these inputs"):
        capture(Overwritten(), (torch.randn(4, 6),), {})


def test_what_tracing_raises_is_told():
    class Traced(nn.Module):
        def forward(self, x):
            return [None][int(torch.compiler.is_compiling())] or x * 2

    with pytest.raises(CaptureError, match=r"Tracing it raised IndexError.*out of range"):
        capture(Traced(), (torch.randn(4, 6),), {})


def test_nothing_is_exported_while_it_is_traced():
    class Asks(models.Chain):
        def forward(self, x):
            tells = (torch.compiler.is_exporting(), is_exporting())
            return super().forward(2 * x if any(tells) else x)

    captured = capture(Asks(), (torch.randn(4, 6),), {})
    assert captured.checked == "train and eval"


def test_a_scan_that_is_there_for_compiled_models_alone_is_left_out():
    class Scans(models.Chain):
        def forward(self, x):
            from torch._higher_order_ops.associative_scan import associative_scan

            if associative_scan is not None and torch.compiler.is_compiling():
                x = associative_scan(torch.add, x, 1, combine_mode="generic")
            else:
                x = x.cumsum(1)
            return super().forward(x)

    assert capture(Scans(), (torch.randn(4, 6),), {}).checked == "train and eval"


def test_a_text_without_padding_has_no_mask_as_in_the_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model = transformers.BertModel(config)
    captured = capture(model, (), {"input_ids": torch.randint(50, (4, 8))})
    (attention,) = (
        node for node in captured.graph.nodes if "scaled_dot_product" in str(node.target)
    )
    assert attention.kwargs["attn_mask"] is None


class Odd(tuple):
    def __len__(self):
        raise NotImplementedError


def test_what_tracing_raises_without_a_word_is_told_with_its_place():
    class Traced(models.Chain):
        def forward(self, x):
            one, _ = self.pair
            return super().forward(x) * one

    model = Traced()
    model.pair = Odd((1, 2))
    with pytest.raises(CaptureError, match=r"raised NotImplementedError, at .*: raise NotImpl"):
        capture(model, (torch.randn(4, 6),), {})


def test_a_path_through_an_einsum_that_a_library_plans_is_open(monkeypatch):
    class Planner:
        @staticmethod
        def contract_path(equation, first, *others, optimize):
            int(first.size(0))
            return [[(0, 1)] * len(others)]

    class Contracts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            x = self.layer(x)
            return torch.einsum("btd,bte,bde->btd", x, x, x)

    einsum = torch.backends.opt_einsum
    monkeypatch.setattr(einsum, "enabled", True)
    monkeypatch.setattr(einsum, "is_available", lambda: True)
    monkeypatch.setattr(einsum, "get_opt_einsum", lambda: Planner)
    monkeypatch.setattr(einsum, "strategy", "auto", raising=False)
    assert capture(Contracts(), (torch.randn(4, 6, 6),), {}).checked == "train and eval"
    assert einsum.enabled


@pytest.mark.filterwarnings("ignore")  # what torch tells of such tensors
@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("sparse_coo", lambda x: x.to_sparse()),
        ("sparse_csr", lambda x: x.to_sparse_csr()),
        ("nested", lambda x: torch.nested.nested_tensor([*x])),
        ("nested", lambda x: torch.nested.nested_tensor([*x[:, None]], layout=torch.jagged)),
    ],
)
def test_what_is_no_dense_tensor_is_told(kind, made):
    with pytest.raises(InputError, match=f"is a {kind} tensor"):
        capture(nn.Linear(6, 6), (made(torch.randn(4, 6)),), {})


class Unregistered(models.Chain):
    """Computes with a parameter that is in no `parameters()`; its extra state is a tensor."""

    def __init__(self):
        super().__init__()
        self.scales, self.seen = [nn.Parameter(torch.full((6,), 2.0))], torch.ones(2)

    def forward(self, x):
        return super().forward(x) * self.scales[0].to(x)

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_tensors_that_are_neither_parameters_nor_buffers_are_not_taken_for_such(tmp_path):
    torch.manual_seed(0)
    model, x = Unregistered().double(), torch.randn(8, 6, dtype=torch.float64)
    package = compile_flat(model, (x,), devices=2, microbatches=2)
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    torch.testing.assert_close(pipe(x), model(x))
    assert torch.equal(pipe.state_dict()["_extra_state"], model.seen)
    assert pipe.state_dict().keys() == model.state_dict().keys()
