"""Sizes of inputs besides the batch stay open where the model takes any, and only there."""

import math

import pytest
import torch
from flat import compile_flat, verified
from torch import nn

import fxpipe
from fxpipe.errors import InputError


class Reader(nn.Module):
    """Takes any even length up to 18; `fixed` ties it to the traced one."""

    def __init__(self, fixed=False):
        super().__init__()
        self.fixed = fixed
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("place", torch.randn(12, 8))

    def forward(self, tokens):
        batch, length = tokens.shape
        x = self.embed(tokens)
        if length > 18:
            return self.head(x)
        if self.fixed:
            x = x + self.place
        x = self.mix(x.view(batch, length // 2, 2, 8)).reshape(batch, length, 8)
        return self.head(x.cumsum(1) / length)


def compiled(model):
    tokens = torch.randint(20, (4, 12))
    package = fxpipe.compile(model, (tokens,), devices="cpu*2", microbatches=2)
    return package


def test_another_length_gives_the_models_own_numbers(tmp_path):
    model = Reader().double()
    package = compiled(model)
    assert dict(package.manifest.sizes) == {"length": 12}
    pipe = fxpipe.load(package.write(tmp_path / "out")).double()
    pipe.load_state_dict(model.state_dict())
    for length in (4, 16):
        tokens = torch.randint(20, (5, length))
        torch.testing.assert_close(pipe(tokens), model(tokens), rtol=0, atol=1e-12)


def test_sizes_that_forward_adds_nothing_to_are_left_open():
    class Padded(Reader):
        def forward(self, tokens):
            return self.head(self.embed(tokens) / (tokens.size(1) + 0))

    assert dict(compiled(Padded()).manifest.sizes) == {"length": 12}


def test_a_length_for_which_forward_takes_another_path_is_refused(tmp_path):
    pipe = fxpipe.load(compiled(Reader()).write(tmp_path / "out"))
    with pytest.raises(InputError, match=r"length <= 18, found length 20"):
        pipe(torch.randint(20, (4, 20)))


def test_a_length_that_the_model_fixes_is_a_number(tmp_path):
    package = compiled(Reader(fixed=True))
    assert package.manifest.sizes == {}
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    with pytest.raises(InputError, match=r"must have shape \[batch, 12\], found \[4, 10\]"):
        pipe(torch.randint(20, (4, 10)))


class Windows(nn.Module):
    """Finds the rows, halves and thirds of its windows by way of floats, as Swin does."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        length = x.size(1)
        half = x[:, : int(length * 0.5)].sum(1, keepdim=True)
        windows = self.mix((x + half).reshape(-1, 8))
        rows = int(windows.size(0) / (length / 2 / 2) / 4)
        return self.head(windows.view(rows, -1, 8)[:, : math.ceil(length / 3)])


def test_sizes_by_way_of_floats_are_written_as_whole_numbers(tmp_path):
    model = Windows().double()
    x = torch.randn(4, 12, 8, dtype=torch.float64)
    package = fxpipe.compile(model, (x,), devices="cpu*2", microbatches=2)
    assert dict(package.manifest.sizes) == {"length": 12}
    text = "".join(package.files.values())
    for written in ("x[:, : length // 2]", "view(batch, -1, 8)", ": (length + 2) // 3]"):
        assert written in text
    assert " / " not in text
    pipe = fxpipe.load(package.write(tmp_path / "out")).double()
    pipe.load_state_dict(model.state_dict())
    for length in (8, 20):
        x = torch.randn(5, length, 8, dtype=torch.float64)
        torch.testing.assert_close(pipe(x), model(x), rtol=0, atol=1e-12)


def test_rows_that_are_counted_by_their_offsets_are_the_batchs(tmp_path):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(11, 8, mode="sum"), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.bag(x))

    x = torch.randint(11, (4, 3))
    package = fxpipe.compile(Bag(), (x,), devices="cpu*2", microbatches=2)
    assert package.manifest.outputs[0].spec.shape == ("batch", 3)
    model, pipe = Bag(), fxpipe.load(package.write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    x = torch.randint(11, (6, 5))
    torch.testing.assert_close(pipe(x), model(x))


def test_a_size_that_training_alone_fixes_needs_no_condition(tmp_path):
    class Compares(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, c):
            x = self.first(x)
            c.view(-1, 2, 4)
            return self.last(x + c if self.training else x)

    inputs = torch.randn(4, 8), torch.randn(4, 8)
    package = fxpipe.compile(Compares(), inputs, devices="cpu*2", microbatches=2)
    fxpipe.load(package.write(tmp_path / "out")).step(*inputs, loss_fn=lambda y, _: y.mean())


def test_what_is_taken_off_is_written_so(tmp_path):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def forward(self, x):
            n = x.size(1)
            mixed = self.mix(x).repeat(1, 2, 1)[:, -n:]
            return nn.functional.pad(mixed, (0, 0, 0, n - (n - 1) // 3 * 2))

    package = verified(Last, lambda rows: {"x": torch.randn(rows, 12, 8)}, tmp_path)
    text = "".join(package.files.values())
    assert "[:, -length:]" in text
    assert "length - 2 * ((length - 1) // 3)" in text


def test_a_length_that_no_arithmetic_tells_is_a_number(tmp_path):
    class Square(Windows):
        def forward(self, x):
            side = int(x.size(1) ** 0.5)
            return self.head(self.mix(x.view(-1, side, side, 8))).sum((1, 2))

    x = torch.randn(4, 9, 8)
    package = fxpipe.compile(Square(), (x,), devices="cpu*2", microbatches=2)
    assert package.manifest.sizes == {}


def test_rows_that_no_arithmetic_tells_are_counted_as_they_come(tmp_path):
    class Turned(Windows):
        def forward(self, x):
            first = round(x.size(0) / 2)
            turned = torch.cat([x[first:], self.mix(x[:first])])
            return self.head(turned)

    model = Turned()
    x = torch.randn(4, 8)
    package = fxpipe.compile(model, (x,), devices="cpu*2", microbatches=2)
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    x = torch.randn(6, 8)
    torch.testing.assert_close(pipe(x), torch.cat([model(x[:3]), model(x[3:])]))


class Routed(nn.Module):
    """Rows go to experts, sorted by expert and split by how many each has."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.router = nn.Linear(8, 3)
        self.experts = nn.Parameter(torch.randn(3, 8, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        _, chosen = self.router(self.mix(x)).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.histc(chosen.to(x.dtype), bins=3, min=0, max=3).long()
        parts = torch.split(x[order], counts.tolist())
        out = torch.cat([part @ self.experts[k] for k, part in enumerate(parts)])
        kept = out[out.sum(1) > 0]
        scale = torch.ones(kept.size(0), dtype=x.dtype) / kept.size(0)
        return self.head(torch.zeros_like(out).index_copy(0, order, out)) * scale.sum()


def test_rows_are_split_by_numbers_that_depend_on_data(tmp_path):
    model = Routed().double()
    x = torch.randn(12, 8, dtype=torch.float64)
    package = compile_flat(model, (x,), devices="cpu*2", microbatches=2)
    text = "".join(package.files.values())
    assert ".size(0)" in text
    assert "torch.ops" not in text
    pipe = fxpipe.load(package.write(tmp_path / "out")).double()
    pipe.load_state_dict(model.state_dict())
    x = torch.randn(16, 8, dtype=torch.float64)
    torch.testing.assert_close(pipe(x), torch.cat([model(x[:8]), model(x[8:])]))


class Selected(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        mixed = self.mix(x)
        return self.head(mixed[x[:, 0] > 0]), mixed


def test_rows_that_are_selected_are_put_together(tmp_path):
    verified(Selected, lambda rows: {"x": torch.randn(rows, 8)}, tmp_path)
    pipe, model = fxpipe.load(tmp_path / "out"), Selected()
    pipe.load_state_dict(model.state_dict())
    x = torch.randn(10, 8)
    torch.testing.assert_close(pipe(x), model(x))


def by_rows(rule):
    """A model one of whose layers goes by how many rows it is given, and maybe by the mode."""

    class ByRows(nn.Module):
        def forward(self, x):
            return rule(x, self.training)

    layers = nn.Linear(8, 8), ByRows(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)
    return nn.Sequential(*layers).double()


def normed(x, _):
    """In chunks of eight rows at most."""
    return torch.cat([part - part.mean(0) for part in x.chunk(-(-x.size(0) // 8))])


BY_ROWS = {
    "few": (lambda x, _: x * 2 if len(x) > 4 else x, 2, 3, r"12, where batch > 4, .* has 4"),
    "one": (lambda x, _: x if len(x) == 1 else x - x.mean(0), 2, 12, r"12, where batch > 1, .* 1"),
    "one in eval mode": (
        lambda x, training: x * 2 if len(x) == 1 and not training else x,
        *(2, 12, r"12, where batch > 1, .* has 1"),
    ),
    "chunks": (normed, 1, 2, r"12, where -\(-batch // 8\) == 2, .* has 6"),
}


@pytest.mark.parametrize(("rule", "fits", "cuts", "says"), BY_ROWS.values(), ids=BY_ROWS)
def test_a_forward_that_goes_by_how_many_rows_there_are_is_refused_where_that_differs(
    rule, fits, cuts, says, tmp_path
):
    model, x = by_rows(rule), torch.randn(12, 8, dtype=torch.float64)
    with pytest.raises(InputError, match=says):
        fxpipe.compile(model, (x,), devices="cpu*2", microbatches=cuts)
    package = fxpipe.compile(model, (x,), devices="cpu*2", microbatches=fits)
    pipe = fxpipe.load(package.write(tmp_path / "out")).double()
    pipe.load_state_dict(model.state_dict())
    pieces = x.tensor_split(fits)
    torch.testing.assert_close(pipe(x), torch.cat([model(piece) for piece in pieces]))
    with pytest.raises(InputError, match=r"compiled for inputs where .* in each micro-batch"):
        pipe(x[:fits])


def test_comparisons_of_rows_that_others_imply_are_found_by_their_numbers():
    """As of a float32 convolution: torch chooses its kernel by whether there are 16 rows."""

    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)

        def forward(self, x):
            h = self.conv(x).relu().mean((2, 3))
            return self.head(h * 2 if len(h) >= 9 else h)

    x = torch.randn(32, 3, 8, 8)
    with pytest.raises(
        InputError, match=r"with 32, where batch (> 8|>= 9), and a micro-batch has 8"
    ):
        fxpipe.compile(Convolved(), (x,), devices="cpu*2", microbatches=4)
    package = fxpipe.compile(Convolved(), (x,), devices="cpu*2", microbatches=3)
    assert not {"batch > 8", "batch >= 9"}.isdisjoint(package.capture.conditions)


def test_a_model_without_memory_is_tried_on_one_row_too():
    with fxpipe.without_memory():
        model = by_rows(BY_ROWS["one"][0])
    x = torch.randn(12, 8, dtype=torch.float64)
    with pytest.raises(InputError, match="where batch > 1, and a micro-batch has 1"):
        fxpipe.compile(model, (x,), devices="cpu*2", microbatches=12, profile="analytic:a100")


def in_memory(x, _):
    """As some libraries copy what is large: the numbers are the same."""
    return x.contiguous() if len(x) >= 8 else x


def of_two(x, _):
    assert len(x) > 1, "a row alone has nothing to be compared with"
    return x - x.mean(0)


def of_its_own_in_eval_mode(x, training):
    """Which no graph has: the pipeline has no eval mode."""
    return x if training else x * float(x.detach().sum())


@pytest.mark.parametrize(
    ("rule", "microbatches"), [(in_memory, 3), (of_two, 3), (of_its_own_in_eval_mode, 12)]
)
def test_rows_that_change_no_number_or_that_the_model_itself_refuses_are_no_condition(
    rule, microbatches, tmp_path
):
    model, x = by_rows(rule), torch.randn(12, 8, dtype=torch.float64)
    package = fxpipe.compile(model, (x,), devices="cpu*2", microbatches=microbatches)
    assert package.capture.conditions == ()
    pipe = fxpipe.load(package.write(tmp_path / "out")).double()
    pipe.load_state_dict(model.state_dict())
    pieces = x.tensor_split(microbatches)
    torch.testing.assert_close(pipe(x), torch.cat([model(piece) for piece in pieces]))


@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_size_is_a_number_where_else_nobody_knows_how_many_rows_come_out(microbatches, tmp_path):
    """Any even length could be cut in fours: twice the length would be twice the rows."""

    class Tokens(Windows):
        def forward(self, x):
            return self.head(self.mix(x.flatten(0, 1)).relu().view(-1, 4, 8))

    model, x = Tokens(), torch.randn(4, 4, 8)
    package = fxpipe.compile(model, (x,), devices="cpu*2", microbatches=microbatches)
    assert package.manifest.sizes == {}
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    for rows in (4, 3):
        torch.testing.assert_close(pipe(x[:rows]), model(x[:rows]))
