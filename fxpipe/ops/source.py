"""Where in the user's code an op comes from: its line, and the lines that led to it."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import fx, nn

from fxpipe.ir import SourceLine


def calling_line(node: fx.Node, outer: nn.Module, called: Sequence[nn.Module]) -> SourceLine | None:
    """The line by which `outer` called a module, which led to the op `node`.

    `called` are the modules from there to the op. What lies between the two may be helpers in other
    files (a module's `__call__` written anew); the line is the last in the file of `outer`.
    """
    frames: Sequence[SourceLine] = node.meta.get("frames", ())
    start = _frame(frames, outer)
    if start is None:
        inner = _frame(frames, called[0])
        return frames[inner - 1] if inner else None
    ends = (_frame(frames, module, start + 1) for module in called)
    end = next((end for end in ends if end is not None), len(frames))
    return next(f for f in reversed(frames[start:end]) if f.file == frames[start].file)


def calls_around(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """The modules' calls in whose forwards the line of `node` is, outermost first.

    Of each the module's path, and a key that no other call has.
    """
    stack: tuple[tuple[str, str], ...] = node.meta.get("stack", ())
    return stack[:-1] if node.op == "call_module" else stack


def line_within(node: fx.Node, module: nn.Module) -> SourceLine | None:
    """The line of `module`'s forward that led to the op `node`."""
    frames: Sequence[SourceLine] = node.meta.get("frames", ())
    place = _frame(frames, module)
    return None if place is None else frames[place]


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


def _frame(frames: Sequence[SourceLine], module: nn.Module, first: int = 0) -> int | None:
    """Which frame, from `first` on, is in the forward of `module`."""
    place = forward_place(type(module))
    if place is None:
        return None
    file, start, end = place
    for k in range(first, len(frames)):
        if frames[k].file == file and start <= frames[k].line < end:
            return k
    return None


def short_path(file: str) -> str:
    """The file without what is of this machine: from site-packages on, else its name."""
    _, found, rest = file.rpartition("site-packages/")
    return rest if found else file.rpartition("/")[2]
