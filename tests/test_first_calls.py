"""What a first call shows: inputs that it writes, of which a package writes copies, and tables."""

import copy

import models
import pytest
import torch
from flat import verified

import fxpipe
from fxpipe.capture import capture


class First(models.Chain):
    def forward(self, x):
        x -= 0.5
        return self.layers(x)


class Late(models.Chain):
    """Twice, once others have read it; and handed out."""

    def forward(self, x):
        y = self.layers(x.clone())
        x.mul_(2).relu_()
        return y * x, x


class OneOfTwo(models.Chain):
    """Whole numbers, through a view."""

    def forward(self, x, ids):
        ids.view(-1).masked_fill_(ids.view(-1) > 3, 0)
        return self.layers(x) * ids


class EvalOnly(models.Chain):
    def forward(self, x):
        if not self.training:
            x.mul_(2)
        return self.layers(x)


class ForAll(models.Chain):
    """One that goes whole to each micro-batch."""

    def forward(self, x, table):
        table.add_(1)
        return self.layers(x) * table.sum(0)


class Uncounted(models.Chain):
    """torch counts no version of it."""

    def forward(self, x):
        x.data.sub_(1)
        return self.layers(x)


def given(kind, rows):
    more = {
        OneOfTwo: {"ids": torch.randint(0, 6, (rows, 6))},
        ForAll: {"table": torch.randn(3, 6)},
    }
    return {"x": torch.randn(rows, 6)} | more.get(kind, {})


KINDS = [First, Late, OneOfTwo, EvalOnly, ForAll, Uncounted]


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_micro_batch_writes_its_own(kind, mode, tmp_path):
    package = verified(kind, lambda rows: given(kind, rows), tmp_path, checkpoint=mode)
    pipe = fxpipe.load(package.write(tmp_path / "again"))
    mine = given(kind, 10)
    before = copy.deepcopy(mine)
    for training in (True, False):
        pipe.train(training)(**mine)
        assert all(torch.equal(mine[name], before[name]) for name in mine)


def test_only_what_is_written_is_copied():
    captured = capture(OneOfTwo(), (), given(OneOfTwo, 4))
    copied = [node.args for node in captured.graph.nodes if node.target == "clone"]
    assert [[value.name for value in args] for args in copied] == [["ids"]]


def test_a_model_without_memory_makes_the_same_calls():
    with fxpipe.without_memory():
        model = First()
    captured = capture(model, (torch.randn(4, 6),), {})
    assert captured.checked == "train and eval, by the calls of torch alone"
    assert "clone" in {node.target for node in captured.graph.nodes}


class Table(models.Chain):
    """In a buffer, from the first call on; an attribute says how far it is filled."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(64, 6), persistent=False)
        self.filled = 0

    def angles(self, length):
        if length > self.filled:
            self.table[:length] = torch.arange(length)[:, None] * torch.linspace(0.1, 1, 6)
            self.filled = length
        return self.table[:length]

    def forward(self, x):
        x = self.layers[:2](x)
        return self.layers[2:](x * self.angles(x.size(1)).cos())


def test_a_table_that_the_first_call_fills_is_no_table_of_zeros(tmp_path):
    verified(Table, lambda rows: {"x": torch.randn(rows, 5, 6)}, tmp_path)
    model = Table()
    capture(model, (torch.randn(4, 5, 6),), {})
    assert model.filled == 0
    pipe = fxpipe.load(tmp_path / "out")
    pipe.load_state_dict(model.state_dict())
    longer = torch.randn(8, 9, 6)
    torch.testing.assert_close(pipe(longer), model(longer))


class Cached(models.Chain):
    """In an attribute, for as long as the length is the same."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.linspace(0.1, 1, 6))
        self.length, self.table = None, None

    def angles(self, length):
        if self.length != length:
            self.length, self.table = length, self.made(length)
        return self.table

    def made(self, length):
        return torch.arange(length)[:, None] * self.steps

    def forward(self, x):
        x = self.layers[:2](x)
        return self.layers[2:](x * self.angles(x.size(1)).cos())


class ReadOut(Cached):
    """Values are looked at while it is made, which no graph can."""

    def made(self, length):
        return torch.tensor([[step if step > 0.5 else 0 for step in self.steps.tolist()]] * length)


def test_a_table_that_a_call_keeps_for_the_next_is_computed_in_each(tmp_path):
    verified(Cached, lambda rows: {"x": torch.randn(rows, 5, 6)}, tmp_path)
    pipe, model = fxpipe.load(tmp_path / "out").double(), Cached().double()
    pipe.load_state_dict(model.state_dict())
    longer = torch.randn(8, 9, 6, dtype=torch.float64)
    torch.testing.assert_close(pipe(longer), model(longer), rtol=0, atol=1e-14)


def test_of_a_table_that_can_not_be_traced_what_a_call_keeps_is_taken(tmp_path):
    verified(ReadOut, lambda rows: {"x": torch.randn(rows, 5, 6)}, tmp_path)
    stages = (file.read_text() for file in (tmp_path / "out").glob("stage_*.py"))
    assert 'register_buffer("constant_' in "".join(stages)
