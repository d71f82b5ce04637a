"""Where in the user's code an op comes from: its line, and the lines that led to it."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import fx, nn

from fxpipe.ir import SourceLine


def calling_line(node: fx.Node, module: nn.Module) -> SourceLine | None:
    """The line that called `module`, whose forward led to the op `node`."""
    found = _frame(node, module)
    return found[0] if found else None


def line_within(node: fx.Node, module: nn.Module) -> SourceLine | None:
    """The line of `module`'s forward that led to the op `node`."""
    found = _frame(node, module)
    return found[1] if found else None


def forward_place(kind: type[nn.Module]) -> tuple[str, int, int] | None:
    """The file of a class's forward, its first line and the one behind its last."""
    return _place(inspect.unwrap(kind.forward))


@cache
def _place(function: Callable[..., Any]) -> tuple[str, int, int] | None:
    try:
        lines, start = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function)
    except (OSError, TypeError):
        return None
    return (short_path(file or ""), start, start + len(lines))


def _frame(node: fx.Node, module: nn.Module) -> tuple[SourceLine | None, SourceLine] | None:
    place = forward_place(type(module))
    if place is None:
        return None
    file, start, end = place
    outer: SourceLine | None = None
    for frame in node.meta.get("frames", ()):
        if frame.file == file and start <= frame.line < end:
            return outer, frame
        outer = frame
    return None


def short_path(file: str) -> str:
    """The file without what is of this machine: from site-packages on, else its name."""
    _, found, rest = file.rpartition("site-packages/")
    return rest if found else file.rpartition("/")[2]
