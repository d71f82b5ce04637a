"""The memory that a plan predicts is what a step holds, where the model's head rules it."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.passes.order_halved import zero_bubble_h1

CLASSES, MORE, WIDTH = 8000, 40000, 32  # of the latter a head is large: see whole_backward.py


class Words(nn.Module):
    """An embedding, layers, and a head that is the embedding again, or not."""

    def __init__(self, tied: bool, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, classes, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize(
    ("schedule", "tied", "classes", "devices"),
    [
        *((schedule, False, CLASSES, 2) for schedule in ("1f1b", "gpipe", "zb-h1", "zb-v")),
        *((schedule, True, CLASSES, 2) for schedule in ("1f1b", "zb-v")),
        *((schedule, tied, MORE, 2) for schedule in ("1f1b", "zb-h1") for tied in (False, True)),
        *(("1f1b", tied, MORE, 1) for tied in (False, True)),
    ],
)
def test_the_heads_lane_holds_no_more_than_predicted_nor_much_less(
    tmp_path, schedule, tied, classes, devices
):
    ids = torch.randint(classes, (8, 4))
    package = fxpipe.compile(
        Words(tied, classes),
        (ids,),
        devices=f"cpu*{devices}",
        microbatches=4,
        schedule=schedule,
        loss_fn=cross_entropy,
        target=ids,
    )
    assert_held(package, tmp_path, cross_entropy, ids, ids)


TWO_STEPS = """
import sys
import torch, fxpipe

pipe = fxpipe.load(sys.argv[1])
x = torch.randn(64, 256)
for _ in range(2):
    with pipe.memory() as memory:
        pipe.step(x, loss_fn=lambda output, target: output.square().mean())
    print(memory.peaks[0].measured_bytes)
"""


def test_the_first_step_of_a_process_holds_as_much_as_the_second(tmp_path):
    """Torch imports more of itself where ops are first counted, and keeps the frames it is in."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    package = fxpipe.compile(model, (torch.randn(64, 256),), devices="cpu*1", microbatches=4)
    command = [sys.executable, "-c", TWO_STEPS, package.write(tmp_path / "package")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = ran.stdout.split()
    assert first == second


class Fuses(nn.Module):
    """Features of four depths, made as large as the first ones and joined."""

    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Conv2d(3 if k == 0 else 16, 16, 3, 2 - (k == 0), 1) for k in range(4)]
        self.convs = nn.ModuleList(wide)
        self.fuse = nn.Conv2d(64, 16, 1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = []
        for conv in self.convs:
            x = conv(x)
            features.append(F.interpolate(x, scale_factor=2 ** len(features)))
        return self.head(self.norm(self.fuse(torch.cat(features, 1))).relu())


def squares(output: Tensor, target: object) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_what_a_head_joins_is_held_no_longer_than_predicted(tmp_path, checkpoint):
    images = torch.randn(8, 3, 32, 32)
    package = on_one_lane(Fuses(), images, squares, checkpoint)
    assert_held(package, tmp_path, squares, None, images)


class Remembers(nn.Module):
    """Layers that return what they computed beside the answer, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        returned = {}
        for k, layer in enumerate(self.layers):
            queries, keys, values = layer(x).chunk(3, -1)
            returned[f"keys {k}"], returned[f"values {k}"] = keys.sigmoid(), values.exp()
            x = x + queries * returned[f"keys {k}"] * returned[f"values {k}"]
        return {"answer": x, **returned}


class Reads(nn.Module):
    """Recurrent layers: one op of many steps, whose backward lets go of them one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.GRU(8, 32, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(x)[0])


def answer_squares(output: dict[str, Tensor], target: object) -> Tensor:
    return output["answer"].square().mean()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(
    ("model", "loss_fn", "width"), [(Remembers, answer_squares, WIDTH), (Reads, squares, 8)]
)
def test_what_gets_no_gradient_and_what_goes_on_the_way_back_is_not_predicted(
    tmp_path, model, loss_fn, width, checkpoint
):
    x = torch.randn(16, 16, width)
    package = on_one_lane(model(), x, loss_fn, checkpoint)
    assert_held(package, tmp_path, loss_fn, None, x)


class Routes(nn.Module):
    """Layers of experts, whose weights a router picks for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(6))
        self.weights = nn.ParameterList(torch.randn(4, WIDTH, WIDTH) for _ in range(6))
        self.biases = nn.ParameterList(torch.randn(4, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for router, weights, biases in zip(self.routers, self.weights, self.biases, strict=True):
            score, choice = router(x).softmax(-1).max(-1)
            x = x + (torch.bmm(x[:, None], weights[choice])[:, 0] + biases[choice]).tanh()
            x = x * score[:, None]
        return x


class Unrolls(nn.Module):
    """A recurrent cell, step by step: all stages have its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for row in x.unbind(1):
            state = self.cell(row, state)
        return self.head(state)


def test_a_lane_holds_another_lanes_weight_once_for_all_its_stages(tmp_path):
    x = torch.randn(8, 12, WIDTH)
    setting = {"devices": "cpu*2", "microbatches": 4, "profile": "analytic:cpu"}
    package = fxpipe.compile(Unrolls(), (x,), loss_fn=squares, schedule="interleaved", **setting)
    assert_held(package, tmp_path, squares, None, x)


class Bends(nn.Module):
    """Layers that save what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).exp().sin().tanh()
        return x


@pytest.mark.parametrize("model", [Routes, Bends])
def test_backwards_that_are_all_halved_hold_no_more_than_predicted(tmp_path, model):
    x = torch.randn(256, WIDTH)
    setting = {"devices": "cpu*2", "microbatches": 4, "schedule": zero_bubble_h1(2, 4)}
    measured = fxpipe.compile(model(), (x,), loss_fn=squares, **setting).profile
    # Of what each op holds; by its times a busy machine would cut elsewhere in each run.
    costs = {
        name: replace(cost, forward_ms=1.0, backward_ms=2.0, weight_gradient_ms=1.0)
        for name, cost in measured.costs.items()
    }
    given = replace(measured, costs=costs)
    package = fxpipe.compile(model(), (x,), loss_fn=squares, profile=given, **setting)
    assert_held(package, tmp_path, squares, None, x)


def on_one_lane(model: nn.Module, x: Tensor, loss_fn, checkpoint: str):
    return fxpipe.compile(
        model,
        (x,),
        devices="cpu*1",
        microbatches=4,
        schedule="1f1b",
        checkpoint=checkpoint,
        loss_fn=loss_fn,
    )


def assert_held(package, folder, loss_fn, target, *inputs) -> None:
    """A lane holds no more than predicted, and not much less: no lane but those of a few bytes."""
    pipe = fxpipe.load(package.write(folder / "out", weights=True))
    pipe.step(*inputs, target=target, loss_fn=loss_fn)
    peaks = []
    for _ in range(3):
        with pipe.memory() as memory:
            pipe.step(*inputs, target=target, loss_fn=loss_fn)
        peaks.append(memory.peaks)
    held = [max(peak.measured_bytes for peak in lane) for lane in zip(*peaks, strict=True)]
    predicted = [peak.predicted_bytes for peak in peaks[0]]
    for measured, foreseen in zip(held, predicted, strict=True):
        assert measured < max(held) / 10 or measured <= foreseen <= 1.1 * measured
