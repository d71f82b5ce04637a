"""Loads TARGET: a file or module that says how to build the model and its inputs.

build() -> nn.Module              or another factory, named after a colon
inputs(batch) -> tuple or dict    positional or keyword arguments of the model's forward
targets(batch)                    if wanted: what `loss` compares the output with
loss(output, target) -> Tensor    if wanted: a scalar
"""

import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture.inputs import batch_of, bind, input_names
from fxpipe.errors import InputError, TargetError
from fxpipe.memory import without_memory
from fxpipe.runtime.structure import describe
from fxpipe.show.texts import plural
from fxpipe.user_code import import_file, import_module, running, shown_line

_FORMS = "TARGET is model.py, model.py:factory or package.module:factory"
_BUILD_SEED, _INPUTS_SEED, _TARGETS_SEED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of one call of the model's forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded TARGET. Its methods seed torch first, so that two calls give the same.

    `folder` is importable while the user's functions run. `loss` is the file's own, if it has one.
    """

    name: str
    file: str
    folder: str
    factory: Callable[[], object]
    make_inputs: Callable[[int], object]
    make_targets: Callable[[int], object] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None

    def build(self) -> nn.Module:
        """The model, with the weights that seed 0 gives. Raises TargetError."""
        model = self._call(self.factory, _BUILD_SEED)
        if not isinstance(model, nn.Module):
            raise TargetError(
                f"{_name(self.factory)}() in {self.file} must return a torch.nn.Module, "
                f"not {_described(model)}"
            )
        return model

    def build_without_memory(self) -> nn.Module:
        """The model with parameters that have no values. Raises TargetError, also if it reads any.

        See `fxpipe.memory.without_memory`.
        """
        try:
            with without_memory():
                return self.build()
        except RuntimeError as error:
            raise TargetError(
                f"{_name(self.factory)}() in {self.file} can't be run without memory: {error}\n"
                "It may not read the values of parameters. With measured costs (no --profile "
                "analytic:...) the model is built as usual."
            ) from error

    def inputs(self, batch: int, model: nn.Module) -> Inputs:
        """Arguments of `model` for a batch of `batch` rows. Raises TargetError."""
        found = self._made_inputs(batch)
        call = f"inputs({batch}) in {self.file}"
        try:
            structure, tensors = describe(bind(model, found.args, found.kwargs)[1])
        except InputError as error:
            placed = [f"{len(found.args)} by position"] if found.args else []
            given = ", ".join([*placed, *found.kwargs]) or "none"
            raise TargetError(f"{call} returned as arguments {given}: {error}") from error
        rows, batched = batch_of(tensors)
        if rows != batch:
            first = batched.index(True)
            name, shape = input_names(structure)[first], list(tensors[first].shape)
            raise TargetError(
                f"{call} returned {plural(rows, 'row')}, since {name!r} has shape {shape}: the "
                "batch is dimension 0, as long as in the first input that has more than one row. "
                f"Return as many rows as are asked for, or give --batch {rows}"
            )
        return found

    def targets(self, batch: int) -> Any:
        """What `loss` compares the output with; None if the file makes none. Raises TargetError."""
        if self.make_targets is None:
            return None
        return self._call(self.make_targets, _TARGETS_SEED, batch)

    def running(self, what: str, alone: bool = False) -> AbstractContextManager[None]:
        """Make the folder importable; turn an exception of the user's own code into TargetError.

        Any exception where that code runs `alone`, and nothing of fxpipe in the block.
        """
        return running(what, self.folder, alone)

    def _made_inputs(self, batch: int) -> Inputs:
        made = self._call(self.make_inputs, _INPUTS_SEED, batch)
        if isinstance(made, Tensor):
            return Inputs((made,), {})
        if isinstance(made, tuple):
            return Inputs(made, {})
        if isinstance(made, dict) and all(isinstance(key, str) for key in made):
            return Inputs((), made)
        raise TargetError(
            f"inputs({batch}) in {self.file} must return a tuple of positional arguments or a dict "
            f"of keyword arguments, not {_described(made)}"
        )

    def _call(self, function: Callable[..., object], seed: int, *args: object) -> object:
        torch.manual_seed(seed)
        call = f"{_name(function)}({', '.join(map(repr, args))}) in {self.file}"
        with self.running(call):
            return function(*args)


def load(text: str) -> Target:
    """Load `model.py`, `model.py:factory` or `package.module:factory`.

    Raises TargetError if it can't be imported, or lacks the factory or `inputs`.
    """
    source, _, factory = text.partition(":")
    if not source:
        raise TargetError(f"{text!r} names no file and no module: {_FORMS}")
    factory = factory or "build"
    is_file = source.endswith(".py") or os.sep in source or source.startswith(".")
    if is_file and Path(source).is_dir():
        raise TargetError(f"{source} is a folder: {_FORMS}")
    if is_file and not Path(source).is_file():
        raise TargetError(f"there is no file {source}: {_FORMS}")
    folder = str(Path(source).resolve().parent if is_file else Path.cwd())
    module = (import_file if is_file else import_module)(source, folder)
    file = source if is_file else str(module.__file__ or source)
    return Target(
        name=text,
        file=file,
        folder=folder,
        factory=_function(module, factory, file, (), "nn.Module"),
        make_inputs=_function(module, "inputs", file, ("batch",), "tuple"),
        make_targets=_optional_function(module, "targets", file, ("batch",)),
        loss=_optional_function(module, "loss", file, ("output", "target")),
    )


def _function(
    module: ModuleType, name: str, file: str, takes: tuple[str, ...], returns: str
) -> Callable[..., Any]:
    function = _optional_function(module, name, file, takes)
    if function is None:
        raise TargetError(
            f"{file} defines no `{name}`: a TARGET needs `build` (or the factory named after the "
            f"colon) and `inputs`. Add `def {name}({', '.join(takes)}) -> {returns}: ...`"
        )
    return function


def _optional_function(
    module: ModuleType, name: str, file: str, takes: tuple[str, ...]
) -> Callable[..., Any] | None:
    found: object = getattr(module, name, None)
    if found is None:
        return None
    if not callable(found):
        raise TargetError(f"`{name}` in {file} must be a function, not {_described(found)}")
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # of some that are written in C
        return found
    try:
        signature.bind(*takes)
    except TypeError as error:
        code = getattr(found, "__code__", None)
        where = f"\n  {shown_line(code.co_filename, code.co_firstlineno)}" if code else ""
        raise TargetError(
            f"`{name}` in {file} is called as {name}({', '.join(takes)}), which it does not take "
            f"({error}): write `def {name}({', '.join(takes)}): ...`{where}"
        ) from error
    return found


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _described(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"a{'n' * (name[0] in 'aeiouAEIOU')} {name}"
