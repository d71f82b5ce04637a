"""A profile as a JSON file: measured once, used again, or carried to another machine."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from fxpipe.devices import PREFIX, device_named
from fxpipe.errors import InputError
from fxpipe.ir import Link, OpCost, Profile


def costs_of(text: str) -> Profile | str:
    """What `--profile` says: a device such as `analytic:h100` as it is, or what a file holds.

    Raises DeviceError for a device that is not known, InputError for a file that is no profile.
    """
    if text.startswith(PREFIX):
        device_named(text)
        return text
    return load_profile(text)


def is_analytic(costs: Profile | str | None) -> bool:
    """Whether costs are, or have been, worked out, so that no model has to run."""
    return isinstance(costs, str) or (costs is not None and costs.origin.startswith(PREFIX))


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write `profile`; read it again with `load_profile`."""
    data = dataclasses.asdict(profile)
    if math.isinf(profile.link.bytes_per_ms):
        data["link"]["bytes_per_ms"] = None  # nothing is copied
    Path(path).write_text(json.dumps(data, indent=1) + "\n")


def load_profile(path: str | Path) -> Profile:
    """Read what `save_profile` wrote. Raises InputError that names what is wrong."""
    try:
        data = json.loads(Path(path).read_text())
        data["costs"] = {name: _cost(cost) for name, cost in data["costs"].items()}
        latency_ms, bytes_per_ms = data["link"]["latency_ms"], data["link"]["bytes_per_ms"]
        data["link"] = Link(latency_ms, math.inf if bytes_per_ms is None else bytes_per_ms)
        return Profile(**data)
    except OSError as error:
        raise InputError(f"the profile {path} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is no profile ({type(error).__name__}: {error}): write one with --save-profile"
        ) from error


def _cost(data: dict[str, Any]) -> OpCost:
    cost = OpCost(**{**data, "saved": tuple((name, size) for name, size in data["saved"])})
    if min(cost.forward_ms, cost.weight_gradient_ms, cost.workspace_bytes) < 0:
        raise ValueError(f"negative cost {cost}")
    if cost.backward_ms < cost.weight_gradient_ms:
        raise ValueError(f"a backward shorter than its part for weights {cost}")
    return cost
