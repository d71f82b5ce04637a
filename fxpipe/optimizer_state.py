"""An optimizer's state under its parameters' original names, as other plans can load it."""

from collections.abc import Mapping
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fxpipe.errors import WeightsError
from fxpipe.runtime.distributed.dtensors import empty_beside
from fxpipe.runtime.microbatch import map_tensors

# What separates a parameter's name from a key of its state: no name has it, as no part is empty.
_DOTS = ".."
# What an optimizer's group has that other stages' processes have otherwise.
_OF_THIS_PLAN = ("params", "param_names")


def optimizer_state(pipe: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By parameter and key, its state; by parameter, its group's settings, and those by its place.

    Raises WeightsError if it trains what is no parameter of `pipe`, or wraps another.
    """
    _refuse_wrapper(optimizer)
    names = _names(pipe, optimizer)
    found: dict[str, Any] = {}
    for k, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key not in _OF_THIS_PLAN}
        # A dict would be taken apart.
        whole = SimpleNamespace(value=settings, optimizer=type(optimizer).__name__)
        found[_places(optimizer, k)[0 if group["params"] else 1]] = whole
        for parameter in group["params"]:
            name = names[parameter]
            found[name] = whole
            for key, value in optimizer.state.get(parameter, {}).items():
                found |= _taken_apart(f"{name}{_DOTS}{key}", value)
    return found


def state_to_load(
    metadata: Metadata, pipe: nn.Module, optimizer: torch.optim.Optimizer, path: str
) -> dict[str, Any]:
    """What a checkpoint has of the optimizer's own parameters, to be loaded into.

    Raises WeightsError if it lacks the state of any, or if the optimizer wraps another.
    """
    _refuse_wrapper(optimizer)
    names = _names(pipe, optimizer)
    parameters = {name: parameter for parameter, name in names.items()}
    found: dict[str, Any] = {}
    there = [key.removeprefix("optimizer.") for key in metadata.state_dict_metadata]
    for k, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            found |= dict.fromkeys([key for key in _places(optimizer, k) if key in there][:1])
    for key, stored in metadata.state_dict_metadata.items():
        own = key.removeprefix("optimizer.")
        name, _, field = own.partition(_DOTS)
        if own != key and name in parameters:
            # A count of steps is no part of the parameter's, also where that has no dimensions.
            like = None if field == "step" else parameters[name]
            found[own] = (
                empty_beside(like, stored.size, stored.properties.dtype)
                if isinstance(stored, TensorStorageMetadata)
                else None
            )
    trained = {names[p] for g in optimizer.param_groups for p in g["params"]}
    missing = sorted(trained - found.keys())
    if missing:
        raise WeightsError(
            f"{path} has no optimizer state of {len(missing)} parameters: {', '.join(missing[:8])}"
        )
    return found


def settings_to_load(pipe: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of what a checkpoint has, the settings of the optimizer's own parameters, by their names."""
    names = _names(pipe, optimizer)
    return dict.fromkeys(names[p] for group in optimizer.param_groups for p in group["params"])


def refuse_other_settings(
    pipe: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> None:
    """Raise WeightsError if another kind of optimizer was saved, or groups were others.

    `settings` are what was loaded for `settings_to_load`.
    """
    names, kind = _names(pipe, optimizer), type(optimizer).__name__
    for group in optimizer.param_groups:
        own = [names[parameter] for parameter in group["params"]]
        for name in own:
            saved = getattr(settings[name], "optimizer", kind)
            if saved != kind:
                raise WeightsError(
                    f"the optimizer that was saved is {saved}, this one is {kind}: give one of the "
                    "same kind, or load the weights alone"
                )
            first, other = settings[own[0]].value, settings[name].value
            for key in first:
                # Some are tensors, or tuples of them.
                if key in other and repr(first[key]) != repr(other[key]):
                    raise WeightsError(
                        f"{own[0]} and {name} are in one group of the optimizer, and were saved "
                        f"with {key} {first[key]} and {other[key]}: put them into the groups they "
                        "were in"
                    )


def give_state(
    pipe: nn.Module, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]
) -> None:
    """Hand what was loaded to the optimizer, as its own `state_dict` would have it."""
    names = _names(pipe, optimizer)
    by_name: dict[str, dict[str, Any]] = {}
    for key in loaded:
        name, dots, field = key.partition(_DOTS)
        if name and dots and _DOTS not in field:
            by_name.setdefault(name, {})[field] = _put_together(key, loaded)
    groups, states, place = [], {}, 0
    for k, group in enumerate(optimizer.param_groups):
        own = [names[parameter] for parameter in group["params"]]
        # Of parameters that are all elsewhere, a group of as many keeps its place among them.
        by = own[:1] or [place for place in _places(optimizer, k) if place in loaded]
        settings = loaded[by[0]].value if by else {}
        groups.append({**group, **settings, "params": list(range(place, place + len(own)))})
        states.update({place + k: by_name[name] for k, name in enumerate(own) if name in by_name})
        place += len(own)
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _places(optimizer: torch.optim.Optimizer, k: int) -> tuple[str, str]:
    """What settings of group k are saved under, where it has parameters and where it has none.

    Where all processes have none of them, what the latter say counts.
    """
    place = f"group {k} of {len(optimizer.param_groups)}"
    return f"{_DOTS}{place}", f"{_DOTS}{place}, empty"


def _taken_apart(key: str, value: Any) -> dict[str, Any]:
    """A state as it is written: of a tuple, list or dict, the tensors by themselves.

    torch would write each item under a key of its own, which doesn't tell what it was an item of.
    """
    if not isinstance(value, tuple | list | Mapping):
        return {key: value}
    tensors: list[Tensor] = []

    def emptied(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return torch.empty(0)

    found: dict[str, Any] = {key: SimpleNamespace(value=map_tensors(emptied, value))}
    return found | {f"{key}{_DOTS}{k}": tensor for k, tensor in enumerate(tensors)}


def _put_together(key: str, loaded: Mapping[str, Any]) -> Any:
    """The state that `_taken_apart` wrote under `key`."""
    value = loaded[key]
    if not isinstance(value, SimpleNamespace):
        return value
    numbers = count()
    return map_tensors(lambda _: loaded[f"{key}{_DOTS}{next(numbers)}"], value.value)


def _refuse_wrapper(optimizer: torch.optim.Optimizer) -> None:
    """Raise WeightsError if another optimizer in it has states of its own."""
    kind = type(optimizer).__name__
    for inner in vars(optimizer).values():
        if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state:
            own = type(inner).__name__
            raise WeightsError(
                f"{kind} keeps states in an optimizer within it, {own}, where a checkpoint does "
                f"not find them: train by {own} itself. Its states are shared out over replicas "
                "by fxpipe.load(..., distributed=True, dp=..., fully_shard=True)"
            )


def _names(pipe: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """The original names of parameters. Raises WeightsError if the optimizer trains others."""
    names: dict[Tensor, str] = {tensor: name for name, tensor in pipe.named_parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if foreign:
        raise WeightsError(
            f"the optimizer trains a parameter of shape {list(foreign[0].shape)} that is none of "
            "the pipeline's: train those by an optimizer of their own, and save that beside"
        )
    return names
