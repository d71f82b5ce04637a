"""A profile as a JSON file: measured once, used again, or carried to another machine."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from fxpipe.costs.devices import PREFIX, device_named
from fxpipe.errors import InputError
from fxpipe.ir import Link, LossCost, Network, OpCost, Profile


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
    data = {
        **{field.name: getattr(profile, field.name) for field in dataclasses.fields(profile)},
        "costs": {name: dataclasses.asdict(cost) for name, cost in profile.costs.items()},
        "network": {
            "link": _link_data(profile.network.link),
            "pairs": {
                f"{source}>{target}": _link_data(link)
                for (source, target), link in profile.network.pairs.items()
            },
        },
        "loss": None if profile.loss is None else dataclasses.asdict(profile.loss),
    }
    Path(path).write_text(json.dumps(data, indent=1) + "\n")


def load_profile(path: str | Path) -> Profile:
    """Read what `save_profile` wrote. Raises InputError that names what is wrong."""
    try:
        data = json.loads(Path(path).read_text())
        data["costs"] = {name: _cost(name, cost) for name, cost in data["costs"].items()}
        data["network"] = _network(data["network"])
        data["loss"] = _loss(data.get("loss"))
        profile = Profile(**data)
        for what in ("capacity_bytes", "batch"):
            if _number(what, getattr(profile, what)) < 1:
                raise ValueError(f"{what} is {getattr(profile, what)}, not positive")
        _not_negative("action_ms", profile.action_ms)
        return profile
    except OSError as error:
        raise InputError(f"the profile {path} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is no profile ({type(error).__name__}: {error}): write one with `fxpipe "
            "profile`"
        ) from error


def _cost(op: str, data: dict[str, Any]) -> OpCost:
    saved = tuple((name, size) for name, size in data["saved"])
    cost = OpCost(**{**data, "saved": saved, "shapes_of": tuple(data.get("shapes_of", ()))})
    for what in (
        "forward_ms",
        "backward_ms",
        "weight_gradient_ms",
        "halving_ms",
        "workspace_bytes",
    ):
        _not_negative(f"{what} of {op}", getattr(cost, what))
    for value, size in cost.saved:
        _not_negative(f"the bytes that {op} saves of {value}", size)
    if cost.backward_ms < cost.weight_gradient_ms:
        raise ValueError(
            f"the backward of {op} takes {cost.backward_ms} ms, its part for weights "
            f"{cost.weight_gradient_ms}"
        )
    return cost


def _loss(data: dict[str, Any] | None) -> LossCost | None:
    """Of a file that an earlier version wrote, none."""
    if data is None:
        return None
    loss = LossCost(**data)
    for what, value in data.items():
        _not_negative(f"{what} of the loss", value)
    return loss


def _network(data: dict[str, Any]) -> Network:
    pairs = {}
    for text, link in data["pairs"].items():
        source, target = map(int, text.split(">"))
        pairs[source, target] = _link(f"the link {text}", link)
    return Network(_link("the link", data["link"]), pairs)


def _link(what: str, data: dict[str, Any]) -> Link:
    latency_ms, bytes_per_ms = data["latency_ms"], data["bytes_per_ms"]
    _not_negative(f"the latency of {what}", latency_ms)
    if bytes_per_ms is not None and _number(f"the bandwidth of {what}", bytes_per_ms) <= 0:
        raise ValueError(f"the bandwidth of {what} is {bytes_per_ms}, not positive")
    return Link(latency_ms, math.inf if bytes_per_ms is None else bytes_per_ms)


def _link_data(link: Link) -> dict[str, float | None]:
    copies = not math.isinf(link.bytes_per_ms)  # else JSON has no number for it
    return {
        "latency_ms": link.latency_ms,
        "bytes_per_ms": link.bytes_per_ms if copies else None,
    }


def _not_negative(what: str, value: object) -> None:
    if _number(what, value) < 0:
        raise ValueError(f"{what} is {value}, a negative cost")


def _number(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} is {value!r}, not a number")
    return value
