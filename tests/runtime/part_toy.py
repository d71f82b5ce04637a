"""A model that no pipeline could hold whole, beside the package of a part of it."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from toys import Part, Toy, write

from fxpipe.runtime.manifest import Manifest, PartSpec


class Branching(nn.Module):
    """`body` is the part; around it are layers, a branch on a value, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.embed(x)
        if x.sum() > 0:
            x = -x
        return self.head(self.norm(self.body(nn.functional.dropout(x, 0.2, self.training))))


class _Body(Branching):
    """The part as a module with the whole model's names."""

    def forward(self, input):
        return self.body(input)


BODY = Toy(
    _Body,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.body = nn.ModuleDict({"0": nn.Linear(6, 7)})

            def forward(self, input):
                return torch.tanh(self.body["0"](input))
            """,
            (None,),
            ("h",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.body = nn.ModuleDict({"2": nn.Linear(7, 5)})

            def forward(self, h):
                return self.body["2"](h)
            """,
            (0,),
            ("y",),
        ),
    ),
)


def write_part(folder: Path, m: int) -> Path:
    """The package of `body`."""
    torch.manual_seed(0)
    write(folder, BODY, m, "1f1b")
    plan = folder / "plan.json"
    part = PartSpec(("body",), "", {}, 0.5, "")
    plan.write_text(replace(Manifest.from_json(plan.read_text()), part=part).to_json())
    return folder
