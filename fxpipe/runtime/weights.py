"""Checks a state_dict as a whole before anything of it is loaded."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import WeightsError

_SHOWN = 8


def check(model: nn.Module, given: Mapping[str, Any], strict: bool) -> None:
    """Raise WeightsError, naming all missing, unexpected and wrongly shaped keys.

    Missing and unexpected ones are allowed unless `strict`.
    """
    wanted: dict[str, Tensor] = model.state_dict()
    missing = [key for key in wanted if key not in given]
    unexpected = [key for key in given if key not in wanted]
    misshapen = [
        f"{key}: expected {list(tensor.shape)}, found {list(given[key].shape)}"
        for key, tensor in wanted.items()
        if key in given and given[key].shape != tensor.shape
    ]
    groups = [("missing", missing if strict else []), ("unexpected", unexpected if strict else [])]
    broken = [
        f"{len(keys)} {what}: {', '.join(keys[:_SHOWN])}{_more(keys)}"
        for what, keys in [*groups, ("of another shape", misshapen)]
        if keys
    ]
    if broken:
        raise WeightsError(
            f"the weights do not fit the model's {len(wanted)} parameters and buffers:\n  "
            + "\n  ".join(broken)
            + "\nnothing was loaded; give the state_dict of the model that was compiled"
        )


def _more(keys: list[str]) -> str:
    return f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
