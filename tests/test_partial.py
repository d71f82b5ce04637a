"""Partial pipelining: what can't be one graph gives a package of its largest part, spliced in."""

import copy
import dataclasses
import re
from pathlib import Path

import models
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import target as targets
from fxpipe.cli import app
from fxpipe.errors import CaptureError, InputError, TargetError
from fxpipe.verify import verify


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 6)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, mask=None):
        y = self.drop(self.b(F.gelu(self.a(x))))
        return x + (y if mask is None else y * mask), None


class Stack(nn.Module):
    """Blocks in a loop, and a branch on a value at one place."""

    where = "start"

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def branch(self, x, where):
        return -x if where == self.where and x.sum() > 0 else x

    def forward(self, x):
        x = self.branch(self.embed(x), "start")
        mask = x.detach().abs()
        for block in self.blocks:
            x = block(x, mask=mask)[0]
        return self.branch(self.head(self.branch(x, "middle")), "end")


class Middle(Stack):
    where = "middle"


class End(Stack):
    where = "end"


class Inside(Stack):
    """One of the blocks can't be captured."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = Branching()


class Branching(Block):
    def forward(self, x, mask=None):
        return super().forward(-x if x.sum() > 0 else x, mask)


class Submodule(models.Chain):
    def forward(self, x):
        return self.layers(x * 2 if x.sum() > 0 else x)


class Writes(Submodule):
    """The first layer writes what it is given, which the model may read after."""

    def __init__(self):
        super().__init__()
        self.layers.insert(0, nn.ReLU(inplace=True))


class Counts(Submodule):
    """Batch norm that a checkpoint would run again, around the part and in it."""

    def __init__(self):
        super().__init__()
        self.before = Again()
        self.layers.append(Again())

    def forward(self, x):
        return super().forward(self.before(x))


class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x):
        return checkpoint(self.norm, x, use_reentrant=False)


class Shown(Stack):
    """Gives what stands between its blocks too."""

    def forward(self, x):
        shown = []
        x = self.branch(self.embed(x), "start")
        for k, block in enumerate(self.blocks):
            x = block(x)[0]
            if k == 1:
                shown.append(x)
        return self.head(x), shown


class Experts(nn.Module):
    """Rows go to the expert that they choose: a loop over those that were chosen."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        x = self.body(x)
        choice = self.gate(x).argmax(1)
        out = torch.zeros_like(x)
        for k in choice.unique().tolist():
            rows = (choice == k).nonzero().squeeze(1)
            out = out.index_add(0, rows, self.experts[k](x[rows]))
        return out


class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x), (x,))


class Chooses(nn.Module):
    """torch.cond, which traces its branches where it runs too."""

    def __init__(self):
        super().__init__()
        self.either = Either()
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))

    def forward(self, x):
        return self.layers(self.either(x))


class Views(Submodule):
    """Two for each row."""

    def forward(self, x, views):
        return super().forward(x + views[::2] - views[1::2])


def target_of(kind):
    folder = str(Path(__file__).parent)
    inputs = lambda rows: {"x": torch.randn(rows, 6)}  # noqa: E731
    return targets.Target(kind.__name__, __file__, folder, kind, inputs)


def compiled(kind, path):
    package = fxpipe.compile(
        kind(),
        (torch.randn(8, 6),),
        devices="cpu*2",
        microbatches=4,
        allow_graph_breaks=True,
    )
    return package.write(path / "out")


PARTS = {
    Stack: ("blocks.0", "blocks.1", "blocks.2", "blocks.3"),
    Middle: ("blocks.0", "blocks.1", "blocks.2", "blocks.3"),
    End: ("blocks.0", "blocks.1", "blocks.2", "blocks.3"),
    Inside: ("blocks.2", "blocks.3"),
    Submodule: ("layers",),
    Counts: ("layers",),
    Writes: ("layers.1", "layers.2", "layers.3", "layers.4"),
    Shown: ("blocks.2", "blocks.3"),
    Experts: ("body",),
    Chooses: ("layers",),
}


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__name__)
def test_the_largest_part_is_pipelined_and_the_rest_runs_as_it_is(kind, tmp_path):
    out = compiled(kind, tmp_path)
    part = fxpipe.load(out).manifest.part
    assert part.modules == PARTS[kind]
    assert "test_partial.py, line" in part.broken_by
    assert 0 < part.share <= 1
    result = verify(out, target_of(kind), batch=10)
    assert result.equal, result
    groups = [difference.group for difference in result.differences]
    assert groups == [
        "backward(): outputs",
        "backward(): gradients",
        "backward(): buffers",
        "eval(): outputs",
    ]


def test_inputs_that_verify_can_not_cut_are_told_as_such_and_what_the_model_raises_as_its_own(
    tmp_path,
):
    def inputs(rows):
        return torch.randn(rows, 6), torch.randn(2 * rows, 6)

    given = {"devices": "cpu*2", "microbatches": 4, "allow_graph_breaks": True}
    out = fxpipe.compile(Views(), inputs(8), **given).write(tmp_path / "out")
    target = dataclasses.replace(target_of(Views), make_inputs=inputs)
    says = (
        r"on the whole batch of 8: verify cuts .* 8 rows, .* of 'views' \(16 rows\)(.|\n)*size of"
    )
    with pytest.raises(InputError, match=says):
        verify(out, target)
    odd = dataclasses.replace(target, make_inputs=lambda n: (inputs(n)[0], torch.randn(15, 6)))
    with pytest.raises(TargetError, match="forward of Views in float64"):
        verify(out, odd)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__name__)
def test_on_a_gpu_the_rest_runs_there_too(kind, tmp_path):
    devices = ["cuda:0", "cuda:0"]
    result = verify(compiled(kind, tmp_path), target_of(kind), batch=10, devices=devices)
    assert result.equal, result


def test_a_spliced_model_is_the_model(tmp_path):
    model = Stack().double()
    plain = copy.deepcopy(model).eval()
    keys = list(model.state_dict())
    spliced = fxpipe.splice(model, fxpipe.load(compiled(Stack, tmp_path)).double())
    assert spliced is model
    assert list(model.state_dict()) == keys
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model.eval(), plain)]
    for rows in (8, 5):
        x = torch.randn(rows, 6, dtype=torch.float64)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).pow(2).mean().backward()
            optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x), rtol=1e-10, atol=1e-12)


class Reads(Stack):
    """Ends the loop when a flag says so, and reads what is between the blocks if another does."""

    read = stop = False

    def forward(self, x):
        x = self.branch(self.embed(x), "start")
        for block in self.blocks:
            x = block(x)[0]
            if self.read:
                x = x * 2
            if self.stop:
                break
        return self.head(x)


@pytest.mark.parametrize("flag", ["read", "stop"])
def test_what_stands_between_the_modules_of_a_part_cannot_be_read(flag, tmp_path):
    pipe = fxpipe.load(compiled(Reads, tmp_path))
    model = fxpipe.splice(Reads(), pipe)
    assert model(torch.randn(8, 6)).shape == (8, 3)
    setattr(model, flag, True)
    with pytest.raises(InputError, match=r"reads what blocks\.0 gives before blocks\.1 does"):
        model(torch.randn(8, 6))


def test_without_leave_it_stays_an_error_and_so_it_does_without_a_part():
    x = torch.randn(8, 6)
    with pytest.raises(CaptureError, match="one graph"):
        fxpipe.compile(Stack(), (x,), devices="cpu*2", microbatches=4)

    class Nothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x):
            return self.a(x if x.sum() > 0 else -x)

    with pytest.raises(CaptureError, match="no run of submodules"):
        fxpipe.compile(Nothing(), (x,), devices="cpu*2", microbatches=4, allow_graph_breaks=True)


def test_the_pipeline_of_a_whole_model_is_not_spliced(tmp_path):
    package = fxpipe.compile(models.Chain(), (torch.randn(8, 6),), devices="cpu", microbatches=2)
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    with pytest.raises(InputError, match="is of all of Chain"):
        fxpipe.splice(models.Chain(), pipe)


def test_the_command_says_which_part_it_took(tmp_path, capsys):
    file = tmp_path / "branching.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))\n\n"
        "    def forward(self, x):\n"
        "        if x.sum() > 0:\n"
        "            x = -x\n"
        "        return self.layers(x)\n\n\n"
        "build = Model\n\n\ndef inputs(batch):\n    return (torch.randn(batch, 4),)\n"
    )
    out = tmp_path / "out"
    arguments = [str(file), "--devices", "cpu*2", "-o", str(out)]
    with pytest.raises(SystemExit) as exit_:
        app(["compile", *arguments], standalone_mode=True)
    assert exit_.value.code == 2
    app(["compile", *arguments, "--allow-graph-breaks"], standalone_mode=False)
    said = capsys.readouterr().err
    assert "took layers, 100% of the parameters" in said
    assert "branching.py, line 11: if x.sum() > 0:" in said
    app(["verify", str(out), str(file)], standalone_mode=False)


class Gated(nn.Module):
    """Leaves what its gate did in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.body = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.used = torch.zeros(())

    def forward(self, x):
        gate = self.gate(x).softmax(1)
        self.used = gate.square().mean()
        return self.body(x) * gate


class Watches(nn.Module):
    """Reads what a part has left."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Gated()

    def forward(self, x):
        x = -x if x.sum() > 0 else x
        return self.part(x) + self.part.used


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x, place):
        return self.layers(x) + place


class Writes(nn.Module):
    """What all blocks are given is another value each time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Placed() for _ in range(3))

    def forward(self, x):
        place = x.new_zeros(())
        x = -x if x.sum() > 0 else x
        for block in self.blocks:
            place += 1
            x = block(x, place)
        return x


class Asserts(Writes):
    """It looks at what goes from block to block."""

    def forward(self, x):
        x = -x if x.sum() > 0 else x
        for block in self.blocks:
            assert isinstance(x, torch.Tensor)
            x = block(x, 1.0)
        return x


class Recomputes(nn.Module):
    """The rest has a checkpoint through which `autograd.grad` can't go."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        x = -x if x.sum() > 0 else x
        return checkpoint(self.head, self.body(x), use_reentrant=True)


def part_of(model, x):
    return fxpipe.compile(
        model,
        (x,),
        devices=2,
        microbatches=2,
        profile="analytic:cpu",
        allow_graph_breaks=True,
    )


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (Watches, "part.body"),
        (Writes, "blocks.0.layers"),
        (Asserts, "blocks.0.layers"),
        (Recomputes, "body"),
    ],
)
def test_a_part_is_one_without_which_the_rest_is_the_same(kind, part, tmp_path):
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(8, 6, dtype=torch.float64)
    plain = copy.deepcopy(model)
    package = part_of(model, x)
    assert package.manifest.part.modules == (part,)
    spliced = fxpipe.splice(model, fxpipe.load(package.write(tmp_path / "out")))
    for batch in (x, -x[:3]):
        torch.testing.assert_close(spliced(batch), plain(batch))


def test_a_spliced_model_is_not_copied(tmp_path):
    model, x = Asserts(), torch.randn(8, 6)
    package = part_of(model, x)
    fxpipe.splice(model, fxpipe.load(package.write(tmp_path / "out")))
    with pytest.raises(InputError, match="Copy the model before"):
        copy.deepcopy(model)


def other_weight(model):
    model.part.body[1].weight = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))


def test_another_weight_in_a_spliced_model_is_the_pipelines_too(tmp_path):
    torch.manual_seed(0)
    model, x = Watches().double(), torch.randn(8, 6, dtype=torch.float64)
    plain = copy.deepcopy(model)
    package = part_of(model, x)
    spliced = fxpipe.splice(model, fxpipe.load(package.write(tmp_path / "out")))
    for each in (plain, spliced):
        other_weight(each)
    torch.testing.assert_close(spliced(x), plain(x))
    spliced(x).sum().backward()
    assert spliced.part.body[1].weight.grad is not None


class Filter(nn.Module):
    """Has settings of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv1d(1, 1, 3, padding=1), nn.Linear(6, 6, bias=False)
        self.act, self.steps, self.config = F.gelu, {"widths": [1, 2]}, object()
        self.words = [str(k) for k in range(1000)]

    def forward(self, x):
        return self.scale(self.act(self.conv(x[:, None])[:, 0]))


class Filters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Filter() for _ in range(3))

    def forward(self, x):
        x = -x if x.sum() > 0 else x
        for block in self.blocks:
            x = block(x)
        return x


def doubled(_, gradients):
    return tuple(2 * gradient for gradient in gradients)


CHANGES = {
    "a hook": ("conv", lambda b: b.conv.register_forward_hook(lambda *_: None)),
    "one for backward": ("conv", lambda b: b.conv.register_full_backward_pre_hook(doubled)),
    "one between": ("", lambda b: b.register_full_backward_pre_hook(doubled)),
    "a module": ("conv", lambda b: setattr(b, "conv", nn.Identity())),
    "a forward": ("conv", lambda b: setattr(b.conv, "forward", torch.tanh)),
    "a number": ("conv.groups", lambda b: setattr(b.conv, "groups", 3)),
    "a tuple": ("conv.dilation", lambda b: setattr(b.conv, "dilation", (2,))),
    "in a list": ("steps", lambda b: b.steps["widths"].append(3)),
    "in a long one": ("words", lambda b: b.words.append("")),
    "a function": ("act", lambda b: setattr(b, "act", F.relu)),
    "an object": ("config", lambda b: setattr(b, "config", object())),
    "no bias": ("conv.bias", lambda b: setattr(b.conv, "bias", None)),
    "a bias": ("scale.bias", lambda b: setattr(b.scale, "bias", nn.Parameter(torch.ones(6)))),
    "none of it": ("act", lambda b: delattr(b, "act")),
}


@pytest.fixture(scope="module")
def filters(tmp_path_factory):
    package = part_of(Filters(), torch.randn(8, 6))
    assert package.manifest.part.modules == ("blocks.0", "blocks.1", "blocks.2")
    return package.write(tmp_path_factory.mktemp("filters") / "out")


@pytest.mark.parametrize("change", CHANGES)
def test_what_else_changes_in_a_spliced_model_is_refused(change, filters):
    spliced, x = fxpipe.splice(Filters(), fxpipe.load(filters)), torch.randn(8, 6)
    spliced(x).sum().backward()
    name, make = CHANGES[change]
    make(spliced.blocks[1])
    place = re.escape(f"blocks.1.{name}" if name else "blocks.1")
    with pytest.raises(InputError, match=rf"^{place} is not what it was as the pipeline was spl"):
        spliced(x)


def test_hooks_run_around_a_spliced_part(tmp_path):
    model, x = Watches().double(), torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    plain = copy.deepcopy(model)
    spliced = fxpipe.splice(model, fxpipe.load(part_of(model, x).write(tmp_path / "out")))
    for each in (plain, spliced):
        part = each.part.body
        part.register_forward_hook(lambda module, args, output: 3 * output)
        part.register_full_backward_pre_hook(doubled)
        part.register_full_backward_hook(lambda module, gradients, _: doubled(module, gradients))
        each(x).sum().backward()
    torch.testing.assert_close(spliced(x), plain(x))
    for a, b in zip(spliced.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
