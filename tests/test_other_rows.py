"""Models that don't take one row more than they were given: multiples of a number, or no more."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import CaptureError, InputError
from fxpipe.runtime.torch_pipelining.crossings import sizes_of_microbatch
from fxpipe.show.texts import checked_text


class Between(nn.Module):
    """`group` computes with several rows at once, between layers."""

    def __init__(self):
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("place", torch.randn(12, 8))

    def forward(self, x):
        return self.last(self.group(self.mix(self.first(x).relu())))


class Pairs(Between):
    """Two views of each image, in sequences of any length, if they are sequences."""

    def group(self, x):
        pairs = x.view(-1, 2, *x.shape[1:])
        return (pairs - pairs.mean(1, keepdim=True)).flatten(0, 1)


class Deviation(Between):
    """StyleGAN2's, of groups of the batch."""

    def group(self, x):
        return x + x.reshape(2, -1, 8).std(0).mean(1, keepdim=True).repeat(2, 1)


class Halves(Between):
    def group(self, x):
        low, high = x.chunk(2)
        return torch.cat([low + high, low - high])


class Quarters(Between):
    """One row more has three chunks of three."""

    def group(self, x):
        return torch.cat([part - part.mean(0) for part in x.chunk(4)])


class Triples(Between):
    """Nothing but the assertion asks for them."""

    def group(self, x):
        assert len(x) % 3 == 0
        return x.sin()


class PairsInTraining(Pairs):
    def group(self, x):
        return super().group(x) if self.training else x


class Doubled(Between):
    """It takes any rows, and does something else with some of them."""

    def group(self, x):
        return x * 2 if len(x) % 2 == 0 else x


class AssertsInEvaluation(Between):
    def group(self, x):
        assert self.training or len(x) % 2 == 0
        return x.sin()


class QuartersInEvaluation(Quarters):
    """Of one row more the graph fails, not the model."""

    def group(self, x):
        return x.sin() if self.training else super().group(x)


class Few(Between):
    def group(self, x):
        return x * 2 if len(x) <= 12 else x


class Padded(Pairs):
    def group(self, x):
        even = torch.cat([x, x[-1:]]) if len(x) % 2 else x
        return super().group(even)[: len(x)]


class FoursOfPairs(Pairs):
    """Takes pairs alone, and does something else with an even number of them."""

    def group(self, x):
        return super().group(x * 2 if len(x) % 4 == 0 else x)


class Slots(Between):
    """There are as many as rows were traced."""

    def group(self, x):
        return x + self.place[: len(x)]


class PairsOfSlots(Pairs):
    def group(self, x):
        return super().group(x + self.place[: len(x)])


class DoubledSlots(Slots):
    def group(self, x):
        return super().group(x * 2 if len(x) % 2 == 0 else x)


class Queue(Between):
    """The batch divides it, as MoCo's: twice 16 rows are taken, and 8 as well."""

    def group(self, x):
        assert 64 % len(x) == 0
        return x.sin()


class Table(Pairs):
    """Reads an input that goes whole to each micro-batch."""

    def forward(self, x, table):
        return super().forward(x + table.sum(0))


class Queries(Between):
    """Several rows of texts for each image, as OwlViT has."""

    def forward(self, texts, images):
        texts = self.first(texts).reshape(images.shape[0], -1, 8)
        return self.last(texts * self.mix(images)[:, None]).sum(1)


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no gradient of this")


class Untrained(Between):
    def group(self, x):
        return NoBackward.apply(x)


def compiled(model, *inputs, microbatches=3):
    return fxpipe.compile(
        model, inputs, devices="cpu*2", microbatches=microbatches, profile="analytic:cpu"
    )


def rows(n, *shape):
    return torch.randn(n, *shape or (8,), dtype=torch.float64)


def loaded(model, package, folder):
    pipe = fxpipe.load(package.write(folder / "out")).double()
    pipe.load_state_dict(model.state_dict())
    return pipe


GROUPS = {
    "pairs": (Pairs, 3, 4, "batch % 2 == 0, .* 3", (8,)),
    "pairs of sequences": (Pairs, 3, 4, "batch % 2 == 0, .* 3", (5, 8)),
    "deviation": (Deviation, 3, 4, "batch % 2 == 0, .* 3", (8,)),
    "halves": (Halves, 3, 4, "batch % 2 == 0, .* 3", (8,)),
    "triples": (Triples, 4, 5, "batch % 3 == 0, .* 2", (8,)),
    "pairs in training": (PairsInTraining, 3, 4, "batch % 2 == 0, .* 3", (8,)),
}


@pytest.mark.parametrize(("kind", "fits", "cuts", "says", "shape"), GROUPS.values(), ids=GROUPS)
def test_rows_are_cut_by_what_forward_takes_multiples_of(kind, fits, cuts, says, shape, tmp_path):
    model, x = kind().double(), rows(12, *shape)
    with pytest.raises(InputError, match=f"captured with 12, where {says}"):
        compiled(model, x, microbatches=cuts)
    pipe = loaded(model, compiled(model, x, microbatches=fits), tmp_path)
    for n in (12, 24):
        x = rows(n, *shape)
        y = torch.cat([model(piece) for piece in x.tensor_split(fits)])
        torch.testing.assert_close(pipe(x), y)
    (y**2).mean().backward()
    pipe.step(x, loss_fn=lambda y, _: (y**2).mean())
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    pipe.eval(), model.eval()
    torch.testing.assert_close(pipe(x), torch.cat([model(piece) for piece in x.tensor_split(fits)]))


def test_calls_whose_microbatches_are_no_multiples_are_refused(tmp_path):
    model = Pairs().double()
    pipe = loaded(model, compiled(model, rows(12)), tmp_path)
    says = "where batch % 2 == 0 in each micro-batch, found batch 5: give other rows"
    for n in (13, 14):  # the model takes 14, but not the five of a first micro-batch
        with pytest.raises(InputError, match=says):
            pipe(rows(n))
        with pytest.raises(InputError, match=says):
            pipe.step(rows(n), loss_fn=lambda y, _: y.mean())
    pipe.eval()
    with pytest.raises(InputError, match=says):
        pipe(rows(13))
    with pytest.raises(InputError, match="where batch % 2 == 0 in each micro-batch, found batch 1"):
        sizes_of_microbatch(pipe.manifest, {"batch": 3})


def test_numbers_of_microbatches_that_cut_groups_are_not_chosen():
    package = compiled(Pairs(), torch.randn(12, 8), microbatches="auto")
    assert {one.microbatches for one in package.manifest.candidates} == {2}


def test_groups_that_are_few_are_tried_as_well():
    """Torch chooses the kernel of a convolution by whether there are 16 rows: no trace tells."""

    class Few(Pairs):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x):
            x = self.conv(x).relu().mean((2, 3))
            return super().forward(x * 2 if len(x) >= 9 else x)

    x = torch.randn(32, 3, 8, 8)
    with pytest.raises(InputError, match=r"32, where batch (> 8|>= 9), and a micro-batch has 8"):
        compiled(Few(), x, microbatches=4)
    assert "batch % 2 == 0" in compiled(Few(), x, microbatches=2).capture.conditions


def test_a_model_without_memory_takes_groups_too():
    with fxpipe.without_memory():
        model = Triples()
    package = compiled(model, torch.randn(12, 8), microbatches=4)
    assert package.capture.conditions == ("batch % 3 == 0",)


def test_conditions_of_a_model_without_memory_stay_where_its_calls_differ():
    """No rows agree, so that none can show that a condition is needless."""
    with fxpipe.without_memory():
        model = Doubled()
    with mock.patch("fxpipe.capture.calls.calls_of", lambda run: (run(), [object()])[1]):
        package = compiled(model, torch.randn(12, 8), microbatches=2)
    assert checked_text(package.capture.checked).startswith("not known to be equal to the model")
    assert package.capture.conditions == ("batch % 2 == 0",)


BY_COMPARISONS = {
    "even": (Doubled, 12, "batch % 2 == 0", 2, 4),
    "odd": (Doubled, 7, "batch % 2 != 0", 1, 2),
    "few": (Few, 12, "batch <= 12", 2, None),
    "padded": (Padded, 12, "batch % 2 == 0", 2, 4),
    "even, of slots": (DoubledSlots, 12, "batch % 2 == 0", 2, 4),
    "fours of pairs": (FoursOfPairs, 12, "batch % 4 == 0", 3, 2),
}


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize(
    ("kind", "batch", "says", "fits", "cuts"), BY_COMPARISONS.values(), ids=BY_COMPARISONS
)
def test_a_forward_that_compares_rows_is_compared_where_that_comes_out_as_traced(
    kind, batch, says, fits, cuts, memory, tmp_path
):
    real, x = kind().double(), rows(batch)
    with contextlib.nullcontext() if memory else fxpipe.without_memory():
        model = real if memory else kind().double()
    package = compiled(model, x, microbatches=fits)
    assert says in package.capture.conditions
    assert package.capture.checked.startswith("train and eval")
    if cuts:
        with pytest.raises(InputError, match=f"captured with {batch}, where batch"):
            compiled(model, x, microbatches=cuts)
    pipe = loaded(real, package, tmp_path)
    torch.testing.assert_close(pipe(x), torch.cat([real(p) for p in x.tensor_split(fits)]))
    with pytest.raises(InputError, match="in each micro-batch, found batch"):
        pipe(rows(2 * batch + 2 if kind is Few else batch + 1))


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("kind", [AssertsInEvaluation, QuartersInEvaluation])
def test_a_model_that_cannot_be_evaluated_on_other_rows_is_pipelined_for_training(
    kind, memory, tmp_path
):
    real, x = kind().double(), rows(8)
    with contextlib.nullcontext() if memory else fxpipe.without_memory():
        model = real if memory else kind().double()
    package = compiled(model, x, microbatches=2)
    assert package.capture.checked.partition(",")[0] == "train"
    pipe = loaded(real, package, tmp_path)
    torch.testing.assert_close(pipe(x), torch.cat([real(piece) for piece in x.tensor_split(2)]))
    with pytest.raises(InputError, match="another path in eval mode"):
        pipe.eval()(x)


def test_a_region_takes_groups_too():
    torch._dynamo.reset()
    model, x = Pairs().double(), rows(12)
    part = torch.compile(model, backend="fxpipe", options={"devices": "cpu*2", "microbatches": 3})
    torch.testing.assert_close(part(x), model(x))
    with pytest.raises(InputError, match="where batch % 2 == 0 in each micro-batch"):
        part(rows(14))


@pytest.mark.parametrize(("kind", "batch"), [(Slots, 12), (Queue, 16)])
def test_a_model_that_takes_fewer_rows_alone_is_compared_there(kind, batch, tmp_path):
    model, x = kind().double(), rows(batch)
    package = compiled(model, x, microbatches=4)
    assert package.capture.conditions == ()
    expected = torch.cat([model(piece) for piece in x.tensor_split(4)])
    torch.testing.assert_close(loaded(model, package, tmp_path)(x), expected)


@pytest.mark.parametrize("memory", [True, False])
def test_groups_of_a_model_that_takes_fewer_rows_alone_stay_whole(memory, tmp_path):
    real, x = PairsOfSlots().double(), rows(12)
    with contextlib.nullcontext() if memory else fxpipe.without_memory():
        model = real if memory else PairsOfSlots().double()
    package = compiled(model, x, microbatches=3)
    assert package.capture.conditions == ("batch % 2 == 0",)
    expected = torch.cat([real(piece) for piece in x.tensor_split(3)])
    torch.testing.assert_close(loaded(real, package, tmp_path)(x), expected)
    with pytest.raises(InputError, match=r"where batch % 2 == 0, .* 3"):
        compiled(model, x, microbatches=4)


def test_an_input_that_goes_whole_is_not_in_the_way():
    assert compiled(Table(), torch.randn(12, 8), torch.randn(5, 8)).capture.conditions == (
        "batch % 2 == 0",
    )


@pytest.mark.parametrize("images", [2, 6, 7])
def test_inputs_of_other_rows_that_belong_together_are_told(images):
    texts = 2 * images
    with pytest.raises(CaptureError) as raised:
        compiled(Queries(), torch.randn(texts, 8), torch.randn(images, 8), microbatches=2)
    told = str(raised.value)
    assert f"Queries.forward takes {texts} rows but not {texts + 1}: it fails at " in told
    assert "\nRuntimeError: shape" in told
    assert f"dimension 0 of 'texts'; 'images' ({images} rows) would go whole" in told
    assert "as [batch, 2, ...] in place of [2 * batch, ...]" in told


@pytest.mark.parametrize("memory", [True, False])
def test_a_graph_that_reads_chunks_that_other_rows_have_not_is_told_so(memory):
    with contextlib.nullcontext() if memory else fxpipe.without_memory():
        model = Quarters()
    with pytest.raises(CaptureError, match="graph fails in train mode: tuple index out of range"):
        compiled(model, torch.randn(8, 8), microbatches=1)


def test_a_model_that_cannot_be_trained_on_what_it_was_given_is_told_so():
    with pytest.raises(InputError, match="trained on these inputs: no gradient of this"):
        compiled(Untrained(), torch.randn(12, 8))
