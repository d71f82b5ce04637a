"""Train and eval mode of modules whose lines a stage has among its own.

A module that a stage calls, as a dropout or a class of blocks.py, has a mode of its own. Where the
lines of its forward stand in the stage instead, they go by the mode of what they stand in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from fxpipe.errors import InputError
from fxpipe.runtime.stage import Stage

_HOLDERS = (nn.Module, nn.ModuleDict, nn.ModuleList, nn.Sequential)


@dataclass(frozen=True, slots=True)
class _Lines:
    """Those of `module` of the pipeline, at `path`, which stand in the code of `owner`."""

    module: nn.Module
    path: str
    owner: nn.Module
    stage: Stage


class Modes:
    """Of all modules below `root`, the pipeline, whose lines hang on the mode of another one."""

    def __init__(self, root: nn.Module, stages: Sequence[Stage]) -> None:
        self._lines = [
            lines
            for stage in stages
            for path in stage.spec.modes
            for lines in _lines(root, stage, path)
        ]

    def check(self) -> None:
        """Raise InputError if such a module is in another mode than its lines."""
        for lines in self._lines:
            if lines.module.training != lines.owner.training:
                own, others = ("train", "eval") if lines.module.training else ("eval", "train")
                raise InputError(
                    f"the pipeline's module {lines.path!r} is in {own} mode, but its lines in "
                    f"{lines.stage.spec.file} go by that of the code around them, {others} mode: "
                    "switch the whole pipeline, or compile with another number of stages, so that "
                    "no cut divides it. (Dropouts and norms that are modules can be switched alone)"
                )


def _lines(root: nn.Module, stage: Stage, path: str) -> Iterator[_Lines]:
    """At each place on the way to `path` that is in the tree, below what the stage has as class."""
    owner: nn.Module = stage.module
    there: nn.Module | None = stage.module
    below: list[tuple[str, nn.Module]] = []
    module: nn.Module | None = root
    parts = path.split(".") if path else []
    for part, name in zip(parts, accumulate(parts, "{}.{}".format), strict=True):
        there = None if there is None else there._modules.get(part)
        module = None if module is None else module._modules.get(part)
        if there is not None and type(there) not in _HOLDERS:
            owner, below = there, []
        elif module is not None:
            below.append((name, module))
    yield from (_Lines(module, name, owner, stage) for name, module in below)
