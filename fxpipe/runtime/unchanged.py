"""What modules compute depends on besides tensors and modes, to be compared from call to call."""

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What torch keeps in each module: of it, what code depends on is looked at by itself.
_TORCHS_OWN = {*vars(nn.Module()), "forward", "_compiled_call_impl"}
_EQUAL = {type(None), bool, int, float, complex, str, bytes, torch.device}
_CONTAINERS = (tuple, list, dict, set, frozenset)
# A container of more items, or further within others, holds data, which each call would look at.
_MOST_ITEMS = 64
_MOST_WITHIN = 3


def code_of(tops: Sequence[nn.Module], paths: Sequence[str]) -> dict[str, dict[str, object]]:
    """By name of each module at `paths` and below: the module, what it calls, and its settings.

    The forwards of `tops` are what is replaced, and left out. So are their hooks, which run around
    those; the ones for backward can't where a forward gives the next one no tensor.
    """
    found: dict[str, dict[str, object]] = {}
    for top, above in zip(tops, paths, strict=True):
        for path, module in top.named_modules(prefix=above):
            held = vars(module)
            kinds = _HOOKS if module is not top else _HOOKS[2:] if len(tops) > 1 else ()
            settings = {name: held[name] for name in held.keys() - _TORCHS_OWN}
            settings |= module._parameters
            settings |= module._buffers
            code = {
                name: value if type(value) in _EQUAL else _compared(value, _MOST_WITHIN)
                for name, value in settings.items()
            }
            forward = None if module is top else held.get("forward")
            hooks = [list(held[kind]) for kind in kinds]
            code[""] = module, type(module), [*module._modules], forward, hooks
            found[path] = code
    return found


def first_change(
    before: Mapping[str, Mapping[str, object]], now: Mapping[str, Mapping[str, object]]
) -> str | None:
    """The name of a module or setting that differs in what `code_of` gave."""
    if before == now:
        return None
    for path in {**before, **now}:
        a, b = before.get(path, {}), now.get(path, {})
        for name in sorted(a.keys() | b.keys()):
            if a.get(name, ...) != b.get(name, ...):
                return f"{path}.{name}" if name else path
    return None


def _compared(value: object, within: int) -> object:
    """What stays equal as long as `value` is the same to the code that reads it."""
    if type(value) in _EQUAL:
        return value
    if isinstance(value, Tensor | weakref.ref):
        return Tensor  # which one it is may change, as the model's state does
    if not isinstance(value, _CONTAINERS):
        return id(value), value  # which keeps another from having its id
    if len(value) > _MOST_ITEMS or within == 0:
        return id(value), len(value), value
    if isinstance(value, set | frozenset):
        return frozenset(value)
    items = value.items() if isinstance(value, dict) else value
    return type(value), [_compared(item, within - 1) for item in items]
