"""Buffers that forward assigns anew: written in place, with the values that the model has."""

import copy
from collections import deque
from itertools import pairwise

import pytest
import torch
from flat import compile_flat, recomputing, verified
from torch import nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.errors import CaptureError


class Base(nn.Module):
    """A layer before and one behind what is tested."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.register_buffer("total", torch.ones(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("other", torch.full((6,), 3.0))

    def forward(self, x):
        return self.last(self.step(self.first(x)))


class Average(Base):
    """Read before and after it is assigned; counted in train mode only."""

    def step(self, x):
        if self.training:
            self.count = self.count + 1
            self.total = 0.9 * self.total + 0.1 * x.detach().mean(0)
        return x / self.total + self.count


class Old(Base):
    """The old value goes on: in a product whose backward needs it, in a view, as it is."""

    def step(self, x):
        old = self.total
        row = self.other[:3]
        self.total = self.total + x.detach().sum(0)
        self.other = self.other * 2
        return x * old + old + self.total + row.repeat(2) * x


class Swapped(Base):
    def step(self, x):
        self.total, self.other = self.other, self.total
        return x * self.total


class Kept(Base):
    """The last but one total is kept; the next is made in place, of values with a gradient."""

    def step(self, x):
        self.other = self.total.detach()
        self.total = torch.zeros_like(self.total)
        self.total += x.mean(0)
        self.total[0] = 0.5
        return x * self.total + self.other


class Twice(Base):
    """A submodule called twice: the second call reads what the first one left."""

    def __init__(self):
        super().__init__()
        self.inner = Average()

    def step(self, x):
        return self.inner(self.inner(x))


class OneInAMode(Base):
    """Another buffer is assigned in each mode, and one in both."""

    def step(self, x):
        if self.training:
            self.total = 0.9 * self.total + 0.1 * x.detach().mean(0)
        else:
            self.other = self.other + 1
        self.count = self.count + 1
        return x / self.total + self.other * self.count


class Only(Base):
    """Written, never read: and each mode writes another value."""

    def step(self, x):
        self.total = x.detach().amax(0) if self.training else x.detach().amin(0)
        return x.relu()


class Branches(Base):
    """Written in train mode, read in eval mode, by ops of the same kind."""

    def step(self, x):
        if self.training:
            self.total.copy_(x.detach().mean(0) * 0.9)
        else:
            x = x + self.total * 0.5
        return x


class Plain(Base):
    """A tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(6)

    def step(self, x):
        self.seen = self.seen + x.detach().mean(0)
        return x + self.seen


class Truncated(Base):
    """What comes before has no gradient by what is kept, which is detached in place."""

    def step(self, x):
        h = x + self.total
        self.total = h.mean(0)
        self.total.detach_()
        return h * self.total


class Moved(Base):
    """Written in place; backward needs it, a view of it, and what it is an index into."""

    def step(self, x):
        if self.training:
            self.total.lerp_(x.detach().std(0) + 1, 0.1)
        self.other[self.count[None]] = self.other.sum()
        self.count.add_(1)
        y = x @ self.total[:, None] @ self.other[None]
        return y * self.total + x[:, self.count[None]]


def rows(batch):
    return {"x": torch.randn(batch, 6)}


KINDS = [Average, Old, Swapped, Kept, Twice, OneInAMode, Only, Branches, Plain, Truncated]


@pytest.mark.parametrize("mode", ["never", "always"])
def test_the_next_micro_batch_leaves_what_backward_needs(mode, tmp_path):
    verified(Moved, rows, tmp_path, checkpoint=mode)


class Scales(nn.Module):
    """Reads what it then assigns anew; its first layer is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        h = self.first(x)
        y = h * self.scale
        self.scale = 0.9 * self.scale + 0.1 * h.detach().abs().mean(0)
        return self.last(y)


@pytest.mark.parametrize("checkpoint", ["never", "always", "part"])
def test_it_may_get_gradients_that_had_none_as_it_was_compiled(checkpoint, tmp_path):
    model, x = Scales().double(), torch.randn(8, 6, dtype=torch.float64)
    whole = checkpoint.replace("part", "never")
    package = compile_flat(model, (x,), devices="cpu*2", microbatches=4, checkpoint=whole)
    if checkpoint == "part":
        bounds = pairwise([0, *package.plan.cuts, len(package.chain.blocks)])
        package = recomputing(package, [[stage] for stage in bounds])
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    for one in (model, pipe):
        one.first.requires_grad_(True)
    for part in inputs[0].chunk(4):
        (model(part).square().mean() / 4).backward()
    pipe.step(inputs[1], loss_fn=lambda output, _: output.square().mean())
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for (name, found), wanted in zip(pipe.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, msg=name)


def test_what_is_handed_out_is_not_written_later(tmp_path):
    class HandsOut(Base):
        def forward(self, x):
            self.total.add_(1)
            return super().forward(x), self.total[:3]

        def step(self, x):
            return x

    package = compile_flat(HandsOut(), kwargs=rows(8), devices=2, microbatches=4)
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    seen = []
    pipe.step(**rows(8), loss_fn=lambda output, _: (seen.append(output[1]), output[0].sum())[1])
    assert [float(total[0]) for total in seen] == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_micro_batch_writes_what_the_model_would(kind, mode, tmp_path):
    package = verified(kind, rows, tmp_path, checkpoint=mode)
    stages = "".join(text for name, text in package.files.items() if name.startswith("stage"))
    assert ".copy_(" in stages
    assert any(stage.mutated_buffers for stage in package.manifest.stages)


def test_the_model_keeps_its_own_tensors_and_attributes():
    class Counts(Average):
        calls = 0

        def step(self, x):
            self.calls += 1
            self.last_input = x
            return super().step(x)

    model = Counts()
    total, attributes = model.total, set(vars(model))
    capture(model, (torch.randn(4, 6),), {})
    assert model.total is total
    assert torch.equal(total, torch.ones(6))
    assert set(vars(model)) == attributes
    assert model.calls == 0


def test_an_input_may_be_what_is_left():
    class Given(Base):
        def forward(self, x, total):
            self.total = total
            return self.last(self.first(x)) * self.total

    captured = capture(Given(), (torch.randn(4, 6),), {"total": torch.randn(6)})
    assert [op.mutates for op in captured.ops.values() if op.mutates] == [("self.total",)]


class Wider(Base):
    def step(self, x):
        self.count = self.count + 0.5
        return x * self.count


class Rows(Base):
    def step(self, x):
        self.total = self.total + x.detach()
        return x * self.total[0]


class Counter(Base):
    """A number that the result depends on: only a buffer can count in a graph."""

    calls = 0

    def step(self, x):
        self.calls += 1
        return x * self.calls


class Memory(Base):
    """None before the first call."""

    memory = None

    def step(self, x):
        before, self.memory = self.memory, x.detach().mean(0)
        return x if before is None else x + before


class History(Base):
    def __init__(self):
        super().__init__()
        self.past = []

    def step(self, x):
        self.past.append(x.detach().mean(0))
        return x + sum(self.past)


class Noted:
    """An object of the user's own."""

    mean = torch.zeros(6)


class Kept(Base):
    """It adds what the call before has put into a container."""

    start = None
    shared = {}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.place = self.start()

    def step(self, x):
        before = self.get()
        self.put(x.detach().mean(0))
        return x + before


class InList(Kept):
    def start(self):
        return [torch.zeros(6)]

    def get(self):
        return self.place[0]

    def put(self, mean):
        self.place[0] = mean


class InNewList(InList):
    def put(self, mean):
        self.place = [mean]


class InDeque(InList):
    def start(self):
        return deque([torch.zeros(6)], maxlen=1)

    def put(self, mean):
        self.place.append(mean)


class InNestedDict(InList):
    def start(self):
        return {"means": {0: torch.zeros(6)}}

    def get(self):
        return self.place["means"][0]

    def put(self, mean):
        self.place["means"] = {0: mean}


class InClass(InList):
    def get(self):
        return self.shared.get("mean", 0.0)

    def put(self, mean):
        self.shared["mean"] = mean


class InObject(InList):
    def start(self):
        return Noted()

    def get(self):
        return self.place.mean

    def put(self, mean):
        self.place.mean = mean


@pytest.mark.parametrize("kind", [InList, InNewList, InDeque, InNestedDict, InClass, InObject])
def test_what_containers_keep_for_the_next_call_is_refused(kind):
    name = "shared" if kind is InClass else "place"
    with pytest.raises(CaptureError, match=f"changes `{name}`: what a later call must know"):
        capture(kind(), (torch.randn(4, 6),), {})


def test_a_table_in_a_dict_and_what_says_how_far_it_goes_are_put_back_together():
    class Table(Base):
        def __init__(self):
            super().__init__()
            self.tables, self.length = {}, 0

        def step(self, x):
            if x.size(-1) > self.length:
                self.length = x.size(-1)
                self.tables["cos"] = torch.arange(float(self.length)).cos()
            return x + self.tables["cos"][: x.size(-1)]

    model = Table()
    assert capture(model, (torch.randn(4, 6),), {}).checked == "train and eval"
    assert (model.tables, model.length) == ({}, 0)


def test_a_tensor_in_a_list_that_is_written_in_place_is_carried_on(tmp_path):
    class InPlace(InList):
        def put(self, mean):
            self.place[0].copy_(mean)

    model, x = InPlace(), torch.randn(8, 6)
    plain = copy.deepcopy(model).double()
    plain.place[0] = plain.place[0].double()
    package = compile_flat(model, (x,), devices=2, microbatches=1)
    pipe = fxpipe.load(package.write(tmp_path / "out")).double()
    assert torch.equal(model.place[0], torch.zeros(6))
    pipe.load_state_dict(plain.state_dict())
    for _ in range(3):
        assert torch.allclose(pipe(x.double()), plain(x.double()))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Wider, "assigns 'count' anew, float32\\[\\] where it was int64\\[\\]"),
        (Rows, "assigns 'total' anew, float32\\[.*, 6\\] where it was float32\\[6\\]"),
        (Counter, "changes `calls`: what a later call must know belongs in a buffer"),
        (Memory, "changes `memory`"),
        (History, "changes `past`"),
    ],
)
def test_what_can_be_no_write_in_place_is_refused(kind, says):
    with pytest.raises(CaptureError, match=says):
        capture(kind(), (torch.randn(4, 6),), {})


def test_what_a_call_only_leaves_behind_is_no_hindrance():
    class Leaves(Base):
        def step(self, x):
            self.seen = x.detach()
            self.calls = getattr(self, "calls", 0) + 1
            self.heads[0] = x.sin()
            self.features.append(x)
            return x + self.heads[0]

    model = Leaves()
    model.heads, model.features = [None], []
    assert capture(model, (torch.randn(4, 6),), {}).checked == "train and eval"
    assert (model.heads, model.features) == ([None], [])
