"""What a plan recomputes stands in the stage's code as what a person would write."""

import re
from itertools import pairwise

import pytest
import torch
from flat import blocks_of, compile_flat, recomputing
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.target import Target
from fxpipe.verify import verify


class Layer(nn.Module):
    """A residual, with dropout and batch norm."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(self.dropout(F.relu(self.norm(self.up(x)), inplace=True)))


class Layers(nn.Module):
    """Six layers between two others."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def rows(batch):
    return {"x": torch.randn(batch, 6)}


def written(package, j):
    """A stage's methods from forward on, without comments."""
    text = package.files[f"stage_{j}.py"].partition("    def forward")[2]
    lines = [re.sub(r"\s*(#|\"\"\").*", "", line) for line in text.splitlines()[1:]]
    return [line.strip() for line in lines if line.strip()]


def checked(package, kind, make, tmp_path, batch=7):
    """The package, which computes what `kind()` does, in train and eval mode."""
    target = Target(kind.__name__, __file__, str(tmp_path), kind, make)
    result = verify(package.write(tmp_path / "out"), target, batch=batch)
    assert result.equal, result
    return package


def layered(tmp_path, *groups, kind=Layers, make=rows):
    """The model in one stage, each group of modules a segment."""
    package = compile_flat(kind(), kwargs=make(6), devices="cpu*1", microbatches=3)
    package = recomputing(package, [[blocks_of(package, *group) for group in groups]])
    return checked(package, kind, make, tmp_path)


def test_a_module_is_called_through_checkpoint(tmp_path):
    package = layered(tmp_path, ["layers.2"], ["last"])
    assert written(package, 0) == [
        "x = self.first(x)",
        "for layer in self.layers[0:2]:",
        "x = layer(x)",
        "x = checkpoint(self.layers[2], x)",
        "for layer in self.layers[3:6]:",
        "x = layer(x)",
        "return checkpoint(self.last, x)",
    ]
    assert "from fxpipe.runtime.segment import checkpoint\n" in package.files["stage_0.py"]


def test_modules_that_are_all_recomputed_one_by_one_stay_a_loop(tmp_path):
    package = layered(tmp_path, *([f"layers.{k}"] for k in range(6)))
    assert written(package, 0) == [
        "x = self.first(x)",
        "for layer in self.layers:",
        "x = checkpoint(layer, x)",
        "return self.last(x)",
    ]


def test_what_is_recomputed_in_one_piece_is_a_method(tmp_path):
    package = layered(tmp_path, ["layers.1", "layers.2", "layers.3"], ["layers.4"])
    assert written(package, 0) == [
        "x = self.first(x)",
        "x = self.layers[0](x)",
        "x = checkpoint(self.recomputed_1, x)",
        "x = checkpoint(self.layers[4], x)",
        "x = self.layers[5](x)",
        "return self.last(x)",
        "def recomputed_1(self, x: Tensor) -> Tensor:",
        "for layer in self.layers[1:4]:",
        "x = layer(x)",
        "return x",
    ]
    told = '"""Computed again in backward: layers.1 to layers.3."""'
    assert told in package.files["stage_0.py"]


def test_a_module_that_a_segment_divides_is_written_out(tmp_path):
    package = layered(tmp_path, ["layers.5.dropout", "layers.5.down"])
    assert written(package, 0)[4:] == [
        "relu = F.relu(layer.norm(layer.up(x)), inplace=True)",
        "down = checkpoint(self.recomputed_1, relu)",
        "x = x + down",
        "return self.last(x)",
        "def recomputed_1(self, relu: Tensor) -> Tensor:",
        'layer = self.layers["5"]',
        "return layer.down(layer.dropout(relu))",
    ]


def test_nothing_is_imported_where_nothing_is_recomputed(tmp_path):
    package = compile_flat(Layers(), kwargs=rows(6), devices="cpu*2", microbatches=3)
    package = recomputing(package, [[], [blocks_of(package, "last")]])
    assert "checkpoint" not in package.files["stage_0.py"]
    assert "checkpoint" in package.files["stage_1.py"]


def test_the_manifest_and_the_command_name_it(tmp_path):
    layered(tmp_path, ["layers.1", "layers.2"], ["layers.4.down"])
    (stage,) = fxpipe.load(tmp_path / "out").manifest.stages
    assert [str(segment) for segment in stage.segments] == ["layers.1-layers.2", "layers.4.down"]
    assert [segment.ops for segment in stage.segments] == [12, 1]


class Crossing(nn.Module):
    """Several values in and out, sizes, a list that grows, what one mode alone makes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 * (k + 1), 6) for k in range(5))
        self.aux = nn.Linear(6, 2)
        self.recomputed_1 = nn.Linear(6, 6)

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)).tanh())
        aux = self.aux(features[2]) if self.training else None
        ones = torch.ones(x.size(0), 1, dtype=x.dtype)
        y = self.recomputed_1(features[-1] * ones).relu() + features[1]
        return (y * x.size(0), aux * 2) if self.training else (y * x.size(0), None)


@pytest.mark.parametrize("seed", range(6))
def test_any_blocks_may_be_recomputed(tmp_path, seed):
    package = compile_flat(Crossing(), kwargs=rows(6), devices="cpu*2", microbatches=3)
    (cut,), end = package.plan.cuts, len(package.chain.blocks)
    numbers = torch.randperm(end - 1, generator=torch.Generator().manual_seed(seed))[:8] + 1
    edges = sorted({0, cut, end, *numbers.tolist()})
    runs = [*pairwise(edges)][seed % 2 :: 1 + seed % 3]
    segments = [[r for r in runs if r[1] <= cut], [r for r in runs if r[0] >= cut]]
    checked(recomputing(package, segments), Crossing, rows, tmp_path)


class Wide(nn.Module):
    """Eight activations in each half, of which every one keeps what it gave."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Sequential(*(nn.Tanh() for _ in range(8))) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.last(self.first(x * self.scale))


def test_memory_is_that_of_the_inputs_and_of_one_segment(tmp_path):
    package = compile_flat(
        Wide(), kwargs=rows(8), devices="cpu*2", microbatches=4, schedule="gpipe"
    )
    (cut,), end = package.plan.cuts, len(package.chain.blocks)
    halves = [(cut, (cut + end) // 2), ((cut + end) // 2, end)]
    x = torch.zeros(4000, 6)
    microbatch = x.numel()  # bytes of a quarter
    peaks = []
    for segments in ([[], []], [[], halves]):
        chosen = recomputing(package, segments)
        pipe = fxpipe.load(chosen.write(tmp_path / "out"))
        for _ in range(2):
            with pipe.memory() as memory:
                pipe.step(x, loss_fn=lambda output, _: output.mean())
        peaks.append(memory.peaks[1].measured_bytes / microbatch)
    n = end - cut
    # Of each micro-batch what the stage received, and all that was kept; or the middle of it alone,
    # and for one micro-batch the half that backward is in. An action has a few tensors besides.
    assert 4 * n <= peaks[0] <= 4 * (n + 1) + 4
    assert peaks[1] <= 4 * 2 + n / 2 + 6
