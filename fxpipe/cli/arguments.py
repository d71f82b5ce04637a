"""What several commands take, and what it is if it is not given."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fxpipe.errors import InputError

BATCH = 8
OPTIMIZER = "sgd"
TIME_LIMIT_S = 30.0

TargetText = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="model.py, model.py:factory or package.module:factory"),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="A package that `compile` wrote.")]
DevicesText = Annotated[
    str, typer.Option("--devices", help="A count, or a list as in cuda:0,cuda:1 and cpu*4.")
]
RunOn = Annotated[
    str | None, typer.Option("--devices", help="Where to run. [default: as compiled]")
]
Seed = Annotated[int, typer.Option("--seed", help="Of the search's chance.")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Threads of the search [default: cores, at most 4]"),
]


class CaptureName(StrEnum):
    """What a step is captured as."""

    GRAPH = "graph"


Capture = Annotated[
    CaptureName | None,
    typer.Option(
        "--capture",
        help="graph: plan for steps that are captured as CUDA graphs, which no host holds up.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")]


def count_of(text: str | None) -> int | str | None:
    """A number of micro-batches, or auto. Raises InputError."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal():
        raise InputError(f"--microbatches is a whole number, at least 1, or auto, not {text!r}")
    return int(text)
