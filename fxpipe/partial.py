"""The largest part of a model that can be captured, where the whole can't be.

Candidates are submodules, and runs of them: modules that a forward calls one after the other, each
with what the one before it gave, as blocks in a loop. They are found by watching one call of the
model, and tried from the largest on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture import capture
from fxpipe.capture.inputs import bind
from fxpipe.capture.names import model_names
from fxpipe.capture.region import Excerpt
from fxpipe.errors import CaptureError, FxpipeError, InputError
from fxpipe.ir import Capture
from fxpipe.ops.interpret import untouched
from fxpipe.partial_check import stands_apart
from fxpipe.runtime.manifest import PartSpec
from fxpipe.runtime.splicing import ReadError, stand_in
from fxpipe.runtime.structure import describe


@dataclass(frozen=True, slots=True)
class Part:
    """The part as a module with the whole model's names, what it was called with, its capture."""

    spec: PartSpec
    module: nn.Module
    given: Mapping[str, Any]
    capture: Capture


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a submodule, arguments by name."""

    path: str
    module: nn.Module
    given: Mapping[str, Any]
    output: Any


@dataclass(frozen=True, slots=True)
class _Link:
    """Where the next module takes what one gave: its argument, and which item of the output."""

    argument: str
    item: int | None


@dataclass(frozen=True, slots=True)
class _Run:
    """Calls of modules, each linked to the one before in the same way."""

    calls: tuple[_Call, ...]
    link: _Link | None = None

    @property
    def size(self) -> int:
        """Parameters, each counted once."""
        parameters = {id(p): p for call in self.calls for p in call.module.parameters()}
        return sum(p.numel() for p in parameters.values())


def largest_part(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], broken_by: CaptureError
) -> Part:
    """The part of `model` with the most parameters that can be captured.

    `broken_by` is why the whole can't. Raises it anew if no part of two modules or more can.
    """
    calls = _watched(model, args, kwargs)
    waiting = [*(_Run((call,)) for call in calls if any(call.module.children())), *_runs(calls)]
    total = _Run((_Call("", model, {}, None),)).size
    entangled: list[str] = []
    while waiting:
        run = max(waiting, key=lambda run: run.size)
        waiting.remove(run)
        if run.size == 0:
            continue
        read = _read_between(model, args, kwargs, run)
        if read is not None:
            parts = run.calls[: read + 1], run.calls[read + 1 :]
            waiting += [_Run(calls, run.link) for calls in parts if len(calls) > 1]
            continue
        module, given = _as_module(model, run), run.calls[0].given
        try:
            captured = capture(module, (), given)
        except FxpipeError:
            if len(run.calls) > 1:
                waiting += _capturable(model, run)
            continue
        modules = [call.module for call in run.calls]
        if not stands_apart(model, args, kwargs, modules, _spec(run), module):
            entangled.append(run.calls[0].path)
            continue
        return Part(_spec(run, run.size / total, broken_by), module, given, captured)
    others = f"but {', '.join(entangled)}, of which the rest reads more than is returned"
    raise CaptureError(
        f"{broken_by}\nNo submodule of it, and no run of submodules, can be captured either"
        + (f", {others}." if entangled else ".")
    ) from broken_by


def _watched(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[_Call]:
    """The calls of all submodules that are called once, in the order in which they end."""
    calls: list[_Call] = []
    paths = {id(module): path for path, module in model.named_modules() if path}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # as torch.cond does with its branches
            return
        try:
            given = bind(module, args, kwargs)[1]
        except InputError:  # takes *args
            return
        calls.append(_Call(paths[id(module)], module, given, output))

    handles = [
        module.register_forward_hook(note, with_kwargs=True)
        for path, module in model.named_modules()
        if path
    ]
    try:
        with untouched(model, model_names(model).state):
            model.train()
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    count: dict[str, int] = {}
    for call in calls:
        count[call.path] = count.get(call.path, 0) + 1
    return [call for call in calls if count[call.path] == 1]


def _runs(calls: Sequence[_Call]) -> Iterator[_Run]:
    """All longest runs of two or more."""
    siblings: dict[str, list[_Call]] = {}
    for call in calls:
        siblings.setdefault(call.path.rpartition(".")[0], []).append(call)
    for group in siblings.values():
        run = _Run((group[0],))
        for call in group[1:]:
            link = _link(run.calls[0], run.calls[-1], call)
            if link is not None and run.link in (None, link):
                run = _Run((*run.calls, call), link)
                continue
            if run.link is not None:
                yield run
            run = _Run((call,))
        if run.link is not None:
            yield run


def _link(first: _Call, before: _Call, call: _Call) -> _Link | None:
    """How `call` follows `before`; None if it takes anything that `first` did not."""
    outputs: dict[int | None, Any] = {None: before.output}
    if isinstance(before.output, tuple | list):
        outputs = {**dict(enumerate(before.output))}
    links = [
        _Link(argument, item)
        for argument, value in call.given.items()
        for item, output in outputs.items()
        if isinstance(value, Tensor) and value is output
    ]
    if len(links) != 1 or set(call.given) != set(first.given):
        return None
    (link,) = links
    others = [name for name in call.given if name != link.argument]
    return link if all(_same(call.given[name], first.given[name]) for name in others) else None


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, bool | int | float | str):
        return type(value) is type(other) and bool(value == other)
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    return value is other


def _read_between(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: _Run
) -> int | None:
    """The first module of the run whose output is read by more than the next one."""
    modules = [call.module for call in run.calls]
    stand_in(modules, _spec(run), lambda **_: run.calls[-1].output)
    try:
        with untouched(model, model_names(model).state):
            model.train()
            describe(model(*args, **kwargs))
    except ReadError as error:
        return error.k
    except Exception:  # it is part of the model's output, or looked at
        return 0
    finally:
        for module in modules:
            del module.forward
    return None


def _capturable(model: nn.Module, run: _Run) -> list[_Run]:
    """The longest runs within `run` of modules that can be captured one by one."""
    runs: list[_Run] = []
    part: tuple[_Call, ...] = ()
    for call in run.calls:
        try:
            capture(_as_module(model, _Run((call,))), (), call.given)
        except FxpipeError:
            runs.append(_Run(part, run.link))
            part = ()
        else:
            part = (*part, call)
    runs.append(_Run(part, run.link))
    return [each for each in runs if 1 < len(each.calls) < len(run.calls)]


def _as_module(model: nn.Module, run: _Run) -> nn.Module:
    """The run as a module that has all that `model` has, under the same names."""
    paths = [call.path for call in run.calls]
    link = run.link

    def forward(self: nn.Module, **given: Any) -> Any:
        output = self.get_submodule(paths[0])(**given)
        for path in paths[1:]:
            assert link is not None
            given[link.argument] = output if link.item is None else output[link.item]
            output = self.get_submodule(path)(**given)
        return output

    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += signature(run.calls[0].module.forward).parameters.values()
    forward.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    name = type(run.calls[0].module if len(paths) == 1 else model).__name__
    fields: dict[str, Callable[..., Any]] = {"forward": forward}
    made: nn.Module = object.__new__(type(name, (Excerpt,), fields))
    made.__dict__ = dict(model.__dict__)
    return made


def _spec(run: _Run, share: float = 0.0, broken_by: Exception | str = "") -> PartSpec:
    between = {} if run.link is None else describe(run.calls[0].output)[0]
    return PartSpec(
        modules=tuple(call.path for call in run.calls),
        argument=run.link.argument if run.link is not None else "",
        between=between,
        share=share,
        broken_by="\n".join(str(broken_by).splitlines()[:2]),
    )
