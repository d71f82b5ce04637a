"""What is only read detached has no gradient in a pipeline either, wherever it is cut."""

import pytest
import torch
from flat import compile_flat, cut_everywhere
from torch import nn
from torch.nn import functional as F

import fxpipe


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.scores, self.last = (nn.Linear(6, 6) for _ in range(3))


class Detaches(Layers):
    """The scores' layer gets no gradient, so that what it read may be written."""

    def forward(self, x):
        h = self.first(x)
        scores = self.scores(h)
        h = F.relu(h, inplace=True)
        return self.last(h) * scores.detach().softmax(-1)


class Picks(Layers):
    def forward(self, x):
        h = self.first(x)
        picked = self.scores(h).argmax(-1)
        return self.last(h) * F.one_hot(picked, 6)


class Regards(Layers):
    def forward(self, x):
        h = self.first(x)
        scores = self.scores(h)
        with torch.no_grad():
            weight = scores.softmax(-1) * 2
        return self.last(h) * weight


class PutsIn(Layers):
    """A gradient comes to the scores by what they are put into."""

    def forward(self, x):
        scores = self.scores(self.first(x))
        rows = torch.zeros_like(x)
        rows[:, 2:] = scores[:, 2:]
        return self.last(rows)


class Casts(Layers):
    """To the dtype that it has: what is read then is the same tensor, with its gradient."""

    def forward(self, x):
        h = self.first(x)
        with torch.no_grad():
            h = h.to(x.dtype)
        return self.last(self.scores(h))


class WritesWithout(Layers):
    def forward(self, x):
        h = self.first(x)
        with torch.no_grad():
            h = h.mul_(2)
        return self.last(self.scores(h))


@pytest.mark.parametrize("backward", ["step", "call"])
@pytest.mark.parametrize("kind", [Detaches, Picks, Regards, PutsIn, Casts, WritesWithout])
def test_gradients_are_there_where_the_models_are(kind, backward, tmp_path):
    x = torch.randn(8, 6, dtype=torch.float64)
    made = compile_flat(kind().double(), (x,), devices="cpu*2", microbatches=2)
    for package in cut_everywhere(made):
        model = kind().double()
        model(x).square().mean().backward()
        pipe = fxpipe.load(package.write(tmp_path / str(package.plan.cuts[0])))
        pipe.load_state_dict(model.state_dict())
        if backward == "step":
            pipe.step(x, loss_fn=lambda output, _: output.square().mean())
        else:
            pipe(x).square().mean().backward()
        for (name, found), wanted in zip(pipe.named_parameters(), model.parameters(), strict=True):
            assert (found.grad is None) == (wanted.grad is None), name
            if wanted.grad is not None:
                torch.testing.assert_close(found.grad, wanted.grad, msg=name)


class Regarded(Layers):
    def forward(self, x):
        return self.last(torch.tanh(self.first(x).detach()))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_edited_stage_detaches_what_it_says_alone(checkpoint, tmp_path):
    model, x = Regarded(), torch.randn(8, 6)
    options = {"devices": "cpu*2", "microbatches": 2, "checkpoint": checkpoint}
    for package in cut_everywhere(compile_flat(model, (x,), **options)):
        out = package.write(tmp_path / str(package.plan.cuts[0]))
        for file in out.glob("stage_*.py"):
            file.write_text(file.read_text().replace(".detach()", ""))
        pipe = fxpipe.load(out)
        pipe.load_state_dict(model.state_dict())
        pipe.step(x, loss_fn=lambda output, _: output.square().mean())
        model.last(torch.tanh(model.first(x))).square().mean().backward()
        torch.testing.assert_close(pipe.first.weight.grad, model.first.weight.grad)
        model.zero_grad()


class Chosen(Layers):
    """Numbers that have no gradient go from stage to stage too."""

    def forward(self, x):
        h = self.first(x)
        return self.last(h) + h.argmax(1, keepdim=True)


def test_of_what_an_edited_stage_makes_only_real_numbers_may_have_gradients(tmp_path):
    x = torch.randn(8, 6)
    packages = cut_everywhere(compile_flat(Chosen(), (x,), devices="cpu*2", microbatches=2))
    for package in packages:
        out = package.write(tmp_path / str(package.plan.cuts[0]))
        with (out / "stage_0.py").open("a") as file:
            file.write("# mine\n")
        made = [output.spec for output in fxpipe.load(out)._stages[0].outputs]
        assert [spec.requires_grad for spec in made] == [spec.dtype == "float32" for spec in made]


class Averages(Layers):
    """Its `out=` takes nothing that asks for a gradient; the first layer is frozen."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        h = self.first(x)
        torch.add(self.mean, h.detach().mean(0), out=self.mean)
        return self.last(self.scores(h) + self.mean)


def test_what_comes_of_no_gradient_is_computed_again_without_one(tmp_path):
    x = torch.randn(8, 6)
    made = compile_flat(Averages(), (x,), devices="cpu*2", microbatches=2, checkpoint="always")
    for package in cut_everywhere(made):
        pipe = fxpipe.load(package.write(tmp_path / str(package.plan.cuts[0])))
        given = x.clone().requires_grad_()  # it had none as the model was compiled
        pipe.step(given, loss_fn=lambda output, _: output.square().mean())
        assert given.grad is not None
