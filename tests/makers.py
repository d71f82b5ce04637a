"""The small models with inputs for any number of rows, each captured once for all tests."""

from functools import cache
from pathlib import Path

import models
import torch

from fxpipe.capture import capture
from fxpipe.memory import without_memory
from fxpipe.target import Target


def structured(rows):
    return {"pair": (torch.randn(rows, 6), torch.randn(rows, 6)), "weight": torch.randn(6)}


MAKERS = {
    models.Chain: lambda rows: {"x": torch.randn(rows, 6)},
    models.Skip: lambda rows: {"x": torch.randn(rows, 6)},
    models.Norms: lambda rows: {"x": torch.randn(rows, 3, 8, 8)},
    models.Tied: lambda rows: {"tokens": torch.randint(11, (rows, 5))},
    models.Structured: structured,
    models.Paths: lambda rows: {"x": torch.randn(rows, 6)},
    models.Auxiliary: lambda rows: {"x": torch.randn(rows, 6)},
    models.Cached: lambda rows: {"x": torch.randn(rows, 2, 6)},
    models.Waves: lambda rows: {"x": torch.randn(rows, 6)},
}


def target_of(kind):
    folder = str(Path(models.__file__).parent)
    return Target(kind.__name__, "models.py", folder, kind, MAKERS[kind])


@cache
def captured(kind):
    """The capture of `kind()` on 8 rows."""
    return capture(kind(), (), MAKERS[kind](8))


def built(make):
    """What `make` makes, without memory."""
    with without_memory():
        return make()


@cache
def captured_bare(kind):
    """The same, of a model without memory."""
    return capture(built(kind), (), MAKERS[kind](8))
