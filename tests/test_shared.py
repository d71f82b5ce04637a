"""Whose memory a result is may hang on the mode and the rows: what is written waits for readers."""

import pytest
import torch
from flat import compile_flat, cut_everywhere
from torch import nn
from torch.nn import functional as F

import fxpipe


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mid, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.noise = nn.Dropout(1e-12)  # which makes another tensor and drops nothing
        self.register_buffer("center", torch.zeros(8))


class ReadsADropout(Layers):
    """In evaluation that is its input."""

    def forward(self, x):
        h = self.first(x)
        gate = torch.sigmoid(self.noise(h).view(-1, 8))
        h = F.relu(h, inplace=True)
        return self.last(self.mid(h) * gate)


class ReadsEither(Layers):
    def forward(self, x):
        h = self.first(x)
        either = h * 1.1 if self.training else h
        gate = torch.sigmoid(either)
        h = F.relu(h, inplace=True)
        return self.last(self.mid(h) * gate)


class ReadsWhatIsCopiedOfSeveralRows(Layers):
    """Of one row `contiguous` is a view."""

    def forward(self, x):
        h = self.first(x)
        gate = torch.sigmoid(h[:, :4].contiguous().repeat(1, 2))
        h = F.relu(h, inplace=True)
        return self.last(self.mid(h) * gate)


class SplitsWhatIsCopiedOfSeveralRows(Layers):
    """A tuple's parts are views of what may be a view."""

    def forward(self, x):
        h = self.first(x)
        gate, _ = h[:, :4].contiguous().chunk(2, -1)
        gate = torch.sigmoid(gate.repeat(1, 4))
        h = F.relu(h, inplace=True)
        return self.last(self.mid(h) * gate)


class WritesWhatIsCopiedOfSeveralRows(Layers):
    """Of one row, what it was copied from is written too."""

    def forward(self, x):
        h = self.first(x)
        part = h[:, :4].contiguous().mul_(2)
        return self.last(self.mid(h) * part.repeat(1, 2))


class ReadsItsCenter(Layers):
    """The buffer itself in training, a copy in evaluation, where the output may keep it."""

    def forward(self, x):
        h = self.first(x)
        with torch.no_grad():
            self.center.mul_(0.5).add_(h.mean(0), alpha=0.5)
        target = h.detach() if self.training else h
        target = (target - self.center).softmax(-1)
        return self.last(self.mid(h)) * target


@pytest.mark.parametrize(
    "kind",
    [
        *(ReadsADropout, ReadsEither, ReadsItsCenter),
        *(ReadsWhatIsCopiedOfSeveralRows, SplitsWhatIsCopiedOfSeveralRows),
        WritesWhatIsCopiedOfSeveralRows,
    ],
)
def test_wherever_it_is_cut_it_computes_what_the_model_does(kind, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(6, 8, dtype=torch.float64)
    made = compile_flat(
        kind().double(), (x,), devices="cpu*2", microbatches=6 if "Rows" in kind.__name__ else 3
    )
    rows = made.manifest.batch // made.manifest.microbatches
    for package in cut_everywhere(made):
        model = kind().double()
        pipe = fxpipe.load(package.write(tmp_path / str(package.plan.cuts[0])))
        pipe.load_state_dict(model.state_dict())
        for part in x.split(rows):
            (model(part).square().mean() * rows / len(x)).backward()
        pipe.step(x, loss_fn=lambda output, _: output.square().mean())
        wanted = dict(model.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, msg=name)
        with torch.no_grad():
            found = pipe.eval()(x)
            torch.testing.assert_close(found, torch.cat([model.eval()(p) for p in x.split(rows)]))
