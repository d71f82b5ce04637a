"""Variables that hold memory for nobody are deleted; what a stage computes stays the same."""

import re

import pytest
import torch
from torch import nn

import fxpipe


class Joins(nn.Module):
    """Two branches, joined; `tail` goes on with what was joined, and with the first of them."""

    def __init__(self, branch, tail) -> None:
        super().__init__()
        self.scale = nn.Linear(6, 6)
        self.branch, self.tail = branch, tail

    def forward(self, x):
        x = self.scale(x)
        a = self.branch(x)
        b = self.branch(x + 2)
        return self.tail(torch.cat((a, b), dim=1), a)


def deleted(model, folder):
    """What the stage deletes; it computes what the model does."""
    model, x = model.double(), torch.randn(4, 6).double()
    package = fxpipe.compile(model, (x,), devices="cpu*1", microbatches=2, profile="analytic:cpu")
    pipe = fxpipe.load(package.write(folder / "out", weights=True))
    pipe.step(x, loss_fn=lambda output, _: output.square().mean())
    model(x).square().mean().backward()
    torch.testing.assert_close(pipe.scale.weight.grad, model.scale.weight.grad)
    return re.findall(r"del (.*)", package.files["stage_0.py"])


def flipped(x):
    return x.flip(1)


def test_what_was_joined_is_deleted_if_nothing_keeps_it(tmp_path):
    assert deleted(Joins(flipped, lambda joined, _: joined.sin() + 1), tmp_path) == ["a, b"]


def test_what_was_joined_as_a_view_is_deleted_with_what_it_is_a_view_of(tmp_path):
    def turned(x):
        y = x.flip(1)
        z = y.view(-1, 2, 3)
        return z.transpose(1, 2)

    def tail(joined, _):
        return joined.flatten(1).sin() + 1

    (names,) = deleted(Joins(turned, tail), tmp_path)
    assert len(names.split(", ")) >= 4


def test_a_view_of_what_others_read_as_well_is_left(tmp_path):
    """The first branch is a view of x, which the second reads; that is one of `x + 2`."""
    joins = Joins(lambda x: x[:, 1:], lambda joined, _: joined.sin() + 1)
    assert deleted(joins, tmp_path) == ["total, b"]


def test_what_is_empty_is_not_deleted(tmp_path):
    def tail(joined, _):
        nothing = joined.new_zeros(joined.size(0), 0)
        joined = torch.cat((nothing, joined), dim=1)
        return joined.sin() + 1

    assert deleted(Joins(flipped, tail), tmp_path) == ["a, b", "cat"]


@pytest.mark.parametrize(
    ("branch", "tail"),
    [
        pytest.param(torch.tanh, lambda joined, _: joined.sin() + 1, id="a backward keeps both"),
        pytest.param(flipped, lambda joined, _: joined, id="the method is at its end"),
    ],
)
def test_what_holds_no_memory_by_itself_is_left(tmp_path, branch, tail):
    assert deleted(Joins(branch, tail), tmp_path) == []


def test_what_is_read_behind_the_join_is_left(tmp_path):
    assert deleted(Joins(flipped, lambda joined, a: joined[:, :6].sin() + a), tmp_path) == ["b"]


def test_an_expression_has_no_variable_to_delete(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(6, 6)

        def forward(self, x):
            x = self.scale(x)
            if self.training:
                flip = x.flip(1)
                x = flip.sin() + flip
            return torch.cat((x.flip(1), x), dim=1).sin() + 1

    model, x = Twice().double(), torch.randn(4, 6).double()
    package = fxpipe.compile(model, (x,), devices="cpu*1", microbatches=2, profile="analytic:cpu")
    pipe = fxpipe.load(package.write(tmp_path / "out", weights=True)).eval()
    with torch.no_grad():
        torch.testing.assert_close(pipe(x), model.eval()(x))


class Calls(nn.Module):
    """A module called once, so that its lines stand among those around it."""

    def __init__(self, inner, tail):
        super().__init__()
        self.scale, self.inner, self.tail = nn.Linear(6, 6), Returning(inner), tail

    def forward(self, x):
        x = self.scale(x).exp()
        x = self.inner(x)
        return self.tail(x)


class Returning(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Both(nn.Module):
    """A module behind another; `between` is what the second is given of what the first returns."""

    def __init__(self, first, between, second):
        super().__init__()
        self.scale = nn.Linear(6, 6)
        self.first, self.between, self.second = Returning(first), between, Returning(second)

    def forward(self, x):
        x = self.scale(x).exp()
        x = self.second(self.between(self.first(x)))
        return x.cos() * 2


def sum_of_two(x):
    """No backward keeps `half`, which is read no more once `both` is there."""
    half = x * 0.5
    both = half + half.flip(1)
    return both.sin()


def longer(x):
    x = x.cos() * 2
    return x.sin() + 1


def test_a_variable_of_a_forward_that_returned_is_deleted(tmp_path):
    assert deleted(Calls(sum_of_two, longer), tmp_path) == ["half"]


def test_a_variable_is_deleted_that_the_lines_of_another_module_bind_anew(tmp_path):
    assert deleted(Both(sum_of_two, torch.sin, anew), tmp_path) == ["half", "half"]


def turned(half):
    half = half.flip(1)
    return half


def turned_and_whole(x):
    """The call's variable is another one, and goes as `half` is bound anew at the latest."""
    half = x * 0.5
    x = turned(half).flip(1)
    x = x + half
    half = x * 2
    x = half + 1
    x = x + half
    return x.sin()


def test_of_two_names_for_a_variable_of_the_users_one_is_deleted(tmp_path):
    assert deleted(Calls(turned_and_whole, longer), tmp_path) == ["half_2", "half"]
    text = (tmp_path / "out" / "stage_0.py").read_text()
    assert text.index("half = x * 2") < text.index("del half_2") < text.index("x = half + 1")


def grown(x):
    features = [x]
    for _ in range(3):
        features.append(torch.cat(features, 1)[:, :6] * 0.5)
    return torch.cat(features, 1).sin()


def test_a_list_that_grew_in_a_forward_that_returned_is_deleted(tmp_path):
    assert deleted(Calls(grown, longer), tmp_path) == ["features"]


def half_and_whole(x):
    half = x * 0.5
    return half, half.flip(1) + half


def less_half(both):
    half, x = both
    x = x.flip(1) - half
    return x.sin() + 1


def half_turned(x):
    half = x * 0.5
    return half.t()


def flipped_back(x):
    x = x.flip(1)
    return x.t().sin() + 1


def sorted_anew(both):
    half, x = both
    half, order = half.sort(1)
    return (x * half).sin() + order


def test_what_the_last_line_to_read_it_binds_anew_is_left(tmp_path):
    assert deleted(Both(half_and_whole, tuple, sorted_anew), tmp_path) == []


def test_what_is_small_is_left(tmp_path):
    def shifted(x):
        column = x[:, :1] * 2
        x = x.repeat(1, 100) + column
        return x.sin()

    assert deleted(Calls(shifted, longer), tmp_path) == []


@pytest.mark.parametrize(
    ("inner", "tail", "last"),
    [
        pytest.param(half_and_whole, less_half, "x.flip(1) - half", id="the value"),
        pytest.param(half_turned, flipped_back, "x.flip(1)", id="a view of it"),
    ],
)
def test_what_is_read_behind_a_return_stays_until_then(tmp_path, inner, tail, last):
    assert deleted(Calls(inner, tail), tmp_path) == ["half"]
    text = (tmp_path / "out" / "stage_0.py").read_text()
    assert text.index(last) < text.index("del half")


def anew(x):
    half = x * 0.5
    x = half + half.flip(1)
    return x.sin() + 1


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param(lambda x: x, id="the method is at its end"),
        pytest.param(anew, id="a later line binds the name anew"),
    ],
)
def test_a_variable_that_ends_anyway_is_left(tmp_path, tail):
    assert deleted(Calls(sum_of_two, tail), tmp_path) == []


class Halves(nn.Module):
    """Its blocks differ, so each is written out, and binds anew what the one before has joined."""

    class Block(nn.Module):
        def __init__(self, activation):
            super().__init__()
            self.mix, self.norm, self.activation = nn.Linear(6, 6), nn.LayerNorm(6), activation

        def forward(self, left, right):
            y = self.activation(self.mix(torch.cat([left, right], 1)))
            result = y + torch.cat([left, right], 1)
            result = self.norm(result)
            return result[:, 2:], result[:, :2]

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(6, 6)
        activations = nn.ReLU(), nn.GELU(), nn.Tanh()
        self.blocks = nn.ModuleList(Halves.Block(activation) for activation in activations)

    def forward(self, x):
        x = self.scale(x).view(-1, 6, 1).expand(-1, -1, 6)
        left, right = x[:, 2:], x[:, :2]
        for block in self.blocks:
            left, right = block(left, right)
        return left.sum(1)


def test_what_the_same_line_binds_anew_is_not_deleted_behind_it(tmp_path):
    assert all("result" not in names.split(", ") for names in deleted(Halves(), tmp_path))
