"""What capture could get wrong in silence, and a package computes as the model does."""

import models
import pytest
import torch
from flat import verified
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxpipe.capture import capture
from fxpipe.capture.functions import Functions
from fxpipe.capture.graph import own_graph
from fxpipe.capture.names import model_names
from fxpipe.errors import CaptureError


class Base(models.Chain):
    """What is tested is `step`, behind two layers and before two more."""

    def __init__(self):
        super().__init__()
        self.extra = self.make()

    def make(self):
        return nn.Linear(6, 6)

    def block(self, x):
        return F.dropout(self.extra(x).relu(), 0.5, self.training)

    def forward(self, x):
        return self.layers[2:](self.step(self.layers[:2](x)))


class Reentrant(Base):
    def step(self, x):
        return checkpoint(self.block, x, use_reentrant=True)


class Nested(Base):
    def step(self, x):
        def inner(y):
            return checkpoint(self.block, y, use_reentrant=False) * 2

        return checkpoint(inner, x, use_reentrant=False)


class Counts(Base):
    """Batch norm that the model's own checkpoints would run again, and so count twice."""

    def make(self):
        return nn.BatchNorm1d(6)

    def step(self, x):
        x = checkpoint(self.extra, x, use_reentrant=False)
        return checkpoint(self.extra, x, use_reentrant=True)


class Averages(Base):
    """Over all batches: by how many there were."""

    def make(self):
        return nn.BatchNorm1d(6, momentum=None)

    def step(self, x):
        return self.extra(self.extra(x))


class Sparse(Base):
    def make(self):
        return nn.Embedding(6, 6, sparse=True)

    def step(self, x):
        return x + self.extra(x.argmax(1))


class Autocast(Base):
    """A weight that is cast, used twice, with a part in full precision between."""

    def step(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.extra(x)
            with torch.autocast("cpu", enabled=False):
                y = self.extra(y.to(x.dtype))
            y = self.extra(y)
        return y.to(x.dtype)


class StraightThrough(Base):
    def step(self, x):
        y = self.extra(x)
        with torch.no_grad():
            gate = self.extra(y).sigmoid()
        return gate * y + (y.round() - y).detach()


class Regards(Base):
    """Views that are made where no gradients are, and say that they have one."""

    def step(self, x):
        with torch.no_grad():
            target, same = x[:, :3], x.view(-1, 6)
        y = self.extra(x).relu()
        return torch.cat([y[:, 3:] - target, y[:, :3]], 1) * same


class WritesAList(Base):
    """Of which torch counts no version where its ops are watched."""

    def step(self, x):
        h, g = self.extra(x) + 0, x + 0
        torch._foreach_mul_([h, g], 2.0)
        torch._foreach_add_([h], [g])
        return h + g


class DetachesInPlace(Base):
    """What is detached has no gradients for those alone that read it afterwards."""

    def step(self, x):
        h = self.extra(x)
        y = h * 2
        h.detach_()
        return torch.detach_(self.extra(y)) + y + h


class AsksForGradients(Base):
    """As hooks do where all before is frozen: reentrant checkpoints take no others."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.frozen.register_forward_hook(lambda module, args, made: made.requires_grad_(True))

    def step(self, x):
        h = self.frozen(x.detach())
        return self.extra(h).relu() + h.requires_grad_()


# Of a reentrant checkpoint in eval mode.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

KINDS = [
    Reentrant,
    Nested,
    Counts,
    Averages,
    Sparse,
    Autocast,
    StraightThrough,
    Regards,
    WritesAList,
    DetachesInPlace,
    AsksForGradients,
]


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_it_is_as_in_the_model(kind, mode, tmp_path):
    verified(kind, lambda rows: {"x": torch.randn(rows, 6)}, tmp_path, checkpoint=mode)


def test_recurrent_layers_are_taken():
    class Recurrent(Base):
        def make(self):
            return nn.GRU(6, 6)

        def step(self, x):
            return x + self.extra(x.unsqueeze(0))[0].squeeze(0)

    assert capture(Recurrent(), (torch.randn(4, 6),), {}).checked == "train and eval"


def test_no_device_of_the_trace_is_left():
    class Moves(Base):
        def step(self, x):
            ones = torch.ones(6, device=x.device) + torch.ones(6, device="cpu")
            x = self.extra(x.cpu().to("cpu").to(x.device))
            return x * ones.to("cpu", torch.int64)

    captured = capture(Moves(), (torch.randn(4, 6),), {})
    assert "cpu" not in {node.target for node in captured.graph.nodes}
    assert [node.args[1:] for node in captured.graph.find_nodes(op="call_method", target="to")] == [
        (torch.device("cpu"), torch.int64)  # which is written as `device`
    ]


def test_what_is_made_of_numbers_and_then_moved_is_made_on_the_device():
    class Moved(Base):
        def step(self, x):
            steps = torch.exp(-torch.arange(x.size(1)) / 6).to(x.device)
            return x * steps + torch.arange(6)[None].to(x.dtype)

    graph = capture(Moved(), (torch.randn(4, 6),), {}).graph
    made = graph.find_nodes(op="call_function", target=torch.arange)
    # Where the user moves nothing, all is as in the user's model.
    assert [node.kwargs for node in made] == [{"device": torch.device("cpu")}, {}]


def test_of_a_model_that_is_on_a_gpu_it_is_made_there():
    """The graph is run beside the model before stages have devices of their own."""
    gpu = torch.device("meta")  # stands for one
    given = torch.fx.Graph(torch.fx.GraphModule(nn.Module(), torch.fx.Graph()))
    given.placeholder("x").meta["example_value"] = torch.randn(4, 6, device=gpu)
    numbers = given.call_function(torch.arange, (6,))
    numbers.meta["example_value"] = torch.arange(6)
    given.output((given.call_method("to", (numbers, gpu)),))
    (made,) = own_graph(given, model_names(nn.Module()), ["x"], Functions()).find_nodes(
        op="call_function", target=torch.arange
    )
    assert made.kwargs == {"device": gpu}


def test_a_checkpoint_that_loses_gradients_is_told():
    class First(Base):
        def forward(self, x):
            return self.layers(checkpoint(self.block, x, use_reentrant=True))

    with pytest.raises(CaptureError, match=r"gradients of \['extra.bias', 'extra.weight'\] on one"):
        capture(First(), (torch.randn(4, 6),), {})


def test_the_check_of_gradients_leaves_those_that_are_there():
    model = models.Chain()
    gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    capture(model, (torch.randn(4, 6),), {})
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
