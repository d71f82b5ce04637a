"""What a training step holds for each parameter besides itself: its gradient and optimizer state.

`sgd` is gradients alone. A file says it of any other optimizer, in TOML or JSON, as does

    states = ["float32", "float32"]  # two tensors of the parameter's size, in these dtypes
    gradient = "float32"             # if left out, the parameter's
    master = "float32"               # a copy of the parameter; if left out, there is none

A state's dtype may be "parameter" too, the parameter's own, as torch.optim makes them.
"""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import InputError

_OWN = "parameter"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Dtypes of a parameter's gradient, states, and master copy; `parameter` is its own."""

    name: str
    states: tuple[str, ...] = ()
    gradient: str = _OWN
    master: str | None = None

    def training_factor(self, parameters: Iterable[Tensor]) -> float:
        """Bytes of gradients and states for each byte of the `parameters` that are trained."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        dtypes = [self.gradient, *self.states, *([] if self.master is None else [self.master])]
        held = sum(p.numel() * _itemsize(dtype, p) for p in trained for dtype in dtypes)
        own = sum(p.nbytes for p in trained)
        return held / own if own else float(len(dtypes))

    def __str__(self) -> str:
        parts = [f"gradients{_in(self.gradient)}"]
        if self.states:
            plural = "s" * (len(self.states) > 1)
            kinds = " and ".join(dict.fromkeys(self.states)) if set(self.states) != {_OWN} else ""
            parts.append(f"{len(self.states)} state{plural}{_in(kinds or _OWN)}")
        if self.master is not None:
            parts.append(f"master copies{_in(self.master)}")
        return f"{self.name}: {', '.join(parts)}{'' if len(parts) > 1 else ' only'}"


# What torch.optim keeps, in the parameter's dtype; a step count apart.
OPTIMIZERS = {
    "sgd": Optimizer("sgd"),
    "momentum": Optimizer("momentum", (_OWN,)),
    "adam": Optimizer("adam", (_OWN, _OWN)),
    "adamw": Optimizer("adamw", (_OWN, _OWN)),
}


def optimizer_of(text: str) -> Optimizer:
    """The optimizer of this name, or the one that a TOML or JSON file tells of.

    Raises InputError for a name that is neither, or a file that is not as it must be.
    """
    if text in OPTIMIZERS:
        return OPTIMIZERS[text]
    path = Path(text)
    if path.suffix not in (".toml", ".json"):
        raise InputError(
            f"there is no optimizer {text!r}: use one of {', '.join(OPTIMIZERS)}, or a .toml or "
            ".json file"
        )
    try:
        content = path.read_text()
        data = tomllib.loads(content) if path.suffix == ".toml" else json.loads(content)
        return _read(path.stem, data)
    except OSError as error:
        raise InputError(f"the optimizer {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(
            f'{path} describes no optimizer: {error}; write states = ["float32", "float32"], and '
            'if wanted gradient = "float32" and master = "float32"'
        ) from error


def _read(name: str, data: Any) -> Optimizer:
    if not isinstance(data, dict) or not isinstance(data.get("states"), list):
        raise ValueError("`states` is a list of dtypes")
    unknown = sorted(data.keys() - {"states", "gradient", "master"})
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not known")
    for dtype in [*data["states"], data.get("gradient", _OWN), data.get("master", _OWN)]:
        if dtype != _OWN and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
            raise ValueError(f"{dtype!r} is no dtype of torch")
    return Optimizer(name, tuple(data["states"]), data.get("gradient", _OWN), data.get("master"))


def _itemsize(dtype: str, parameter: Tensor) -> int:
    if dtype == _OWN:
        return parameter.dtype.itemsize
    size: int = getattr(torch, dtype).itemsize
    return size


def _in(dtype: str) -> str:
    return "" if dtype == _OWN else f" in {dtype}"
