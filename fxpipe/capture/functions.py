"""Custom `autograd.Function`s: the user's own text, made to stand alone in a package.

A Function is one op of the graph, since what it does backward is its own affair. Its class is
copied with what it uses (helpers, constants, imports), and the copy is what the graph calls: so
the numeric check holds for what will be written.
"""

import ast
import builtins
import linecache
import math
import re
import sys
from types import ModuleType
from typing import Any

import torch

from fxpipe.capture.definition import definition, edited
from fxpipe.errors import CaptureError

# What a stage file, or Python, means by these names is not to be hidden.
_TAKEN = {"torch", "nn", "F", "Tensor", *dir(builtins)}
_AT_HAND = {"torch", *sys.stdlib_module_names}  # what a package may import


class Functions:
    """Definitions in an order in which they can be run, each run here as it is added."""

    def __init__(self) -> None:
        self._imports: dict[str, str] = {}
        self._definitions: dict[str, str] = {}
        self._written: dict[tuple[str, str], str] = {}
        self._known: dict[int, tuple[str, Any]] = {}
        self._space: dict[str, Any] = {"__name__": "functions"}

    @property
    def text(self) -> str:
        """All definitions behind their imports; empty if there are none."""
        of_torch: list[str] = []
        of_python: list[str] = []
        for line in sorted(
            self._imports.values(), key=lambda line: (line.startswith("from"), line)
        ):
            (of_torch if line.split()[1].startswith("torch") else of_python).append(line)
        parts = ["\n".join(of_python), "\n".join(of_torch), *self._definitions.values()]
        return "\n\n".join(part for part in parts if part) if self._definitions else ""

    def own(self, function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
        """The copy of `function`. Raises CaptureError if it uses what no package can hold."""
        try:
            name = self._name(function, function.__name__)
        except CaptureError as error:
            raise CaptureError(
                f"autograd.Function {function.__name__} can't be written into a package: {error}\n"
                "It may use functions, classes and constants of your files, torch, and what comes "
                "with Python: give it all else as an argument of apply."
            ) from error
        copy: type[torch.autograd.Function] = self._space[name]
        return copy

    def _name(self, value: Any, called: str) -> str:
        """What `value`, which the user calls `called`, is called here."""
        if id(value) not in self._known:
            constant, line = _constant(value), _import(value, called)
            if isinstance(value, torch.dtype):
                self._name(torch, "torch")
            if constant is not None:
                name = self._add(called, f"{called} = {constant}", self._definitions)
            elif line is not None:
                name = self._add(called, line, self._imports)
            else:
                name = self._copy(value)
            self._known[id(value)] = name, value  # held, so that nothing else gets its id
        return self._known[id(value)][0]

    def _copy(self, value: Any) -> str:
        """Add the user's function or class `value`, and before it what it uses."""
        found = definition(value, lambda used: _import(used, "") is not None)
        self._known[id(value)] = found.name, value  # it may use itself
        edits: list[tuple[ast.expr, str]] = []
        for use in found.uses:
            try:
                name = self._name(use.value, use.called)
            except CaptureError as error:
                raise CaptureError(f"{found.name} uses `{use.called}`: {error}") from error
            if use.value is not value and name != ast.unparse(use.node):
                edits.append((use.node, name))
        text = f"# {found.place}\n{edited(found.text, edits)}"
        return self._add(found.name, text, self._definitions)

    def _add(self, called: str, text: str, kind: dict[str, str]) -> str:
        """Run `text`, which defines `called`, under a name that is free; return that name."""
        if (called, text) in self._written:
            return self._written[called, text]
        name, number = called, 1
        while name in self._space or (name in _TAKEN and kind is self._definitions):
            number += 1
            name = f"{called}_{number}"
        self._written[called, text] = name
        if name != called and kind is self._imports:
            text = f"{text.partition(' as ')[0]} as {name}"
        elif name != called:
            text = re.sub(rf"(?<![\w.]){re.escape(called)}(?!\w)", name, text)
        file = f"<functions.py: {name}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        try:
            exec(compile(text, file, "exec", dont_inherit=True), self._space)
        except Exception as error:
            raise CaptureError(f"{called} fails alone: {type(error).__name__}: {error}") from error
        kind[name] = text
        return name


def _constant(value: Any) -> str | None:
    """Text for a number, a string, a dtype, or tuples, lists and dicts of them."""
    if isinstance(value, torch.dtype):
        return repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    try:
        return repr(value) if ast.literal_eval(repr(value)) == value else None
    except (ValueError, SyntaxError, TypeError):
        return None


def _import(value: Any, called: str) -> str | None:
    """The line that imports `value` as `called`, from torch or what comes with Python."""
    if isinstance(value, ModuleType):
        parent, _, name = value.__name__.rpartition(".")
        if value.__name__.partition(".")[0] not in _AT_HAND:
            return None
        return _as(f"from {parent} import {name}" if parent else f"import {name}", name, called)
    home = str(getattr(value, "__module__", None) or "torch")
    if home.partition(".")[0] not in _AT_HAND or home == "__main__":
        return None
    parts = home.split(".")
    for module in [".".join(parts[: k + 1]) for k in range(len(parts))]:
        for name in (called, getattr(value, "__name__", ""), getattr(value, "_name", "")):
            if name and getattr(sys.modules.get(module), name, None) is value:
                return _as(f"from {module} import {name}", name, called)
    return None


def _as(line: str, name: str, called: str) -> str:
    return line if called in (name, "") else f"{line} as {called}"
