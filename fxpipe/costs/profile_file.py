"""A profile as a JSON file: measured once, used again, or carried to another machine."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from fxpipe.costs.devices import PREFIX, device_named
from fxpipe.costs.numbers import MOST_BYTES, UNLIMITED, number, whole
from fxpipe.errors import InputError
from fxpipe.ir import Launch, Link, LossCost, Network, OpCost, Profile
from fxpipe.outputs import check_file, whole_file
from fxpipe.runtime.read_json import refuse_another

_WAY_OUT = "write one with `fxpipe profile`"


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
    """Write `profile`; read it again with `load_profile`. Raises InputError if it can't."""
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
        "launch": None if profile.launch is None else dataclasses.asdict(profile.launch),
    }
    check_profile_file(Path(path))
    with whole_file(Path(path)) as file:
        file.write_text(json.dumps(data, indent=1) + "\n")


def check_profile_file(path: Path) -> None:
    """Raise InputError if no profile can be written at `path`, or another file is there."""
    check_file(path)
    refuse_another(path, "costs", "profile")


def load_profile(path: str | Path) -> Profile:
    """Read what `save_profile` wrote. Raises InputError that names what is wrong."""
    try:
        data = json.loads(Path(path).read_text())
        data["costs"] = {name: _cost(name, cost) for name, cost in data["costs"].items()}
        data["network"] = _network(data["network"])
        data["loss"] = _loss(data.get("loss"))
        data["launch"] = _launch(data.get("launch"))
        return _profile(data)
    except OSError as error:
        raise InputError(f"the profile {path} can't be read: {error.strerror}") from error
    except InputError as error:
        raise InputError(f"{path} is no profile ({error}): {_WAY_OUT}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is no profile ({type(error).__name__}: {error}): {_WAY_OUT}"
        ) from error


def _profile(data: dict[str, Any]) -> Profile:
    profile = Profile(**data)
    for what in ("device", "fingerprint", "origin"):
        _text(what, getattr(profile, what))
    whole("capacity_bytes", profile.capacity_bytes, 1, UNLIMITED)
    whole("batch", profile.batch, 1)
    number("action_ms", profile.action_ms)
    whole("library_bytes", profile.library_bytes)
    for name, size in profile.unknown_bytes.items():
        whole(f"the bytes of {name}", size)
    return profile


def _cost(op: str, data: dict[str, Any]) -> OpCost:
    saved = tuple((name, size) for name, size in data["saved"])
    cost = OpCost(**{**data, "saved": saved, "shapes_of": tuple(data.get("shapes_of", ()))})
    _check_units(op, cost)
    for value, size in cost.saved:
        whole(f"the bytes that {op} saves of {value}", size)
    for name in (*dict(cost.saved), *cost.shapes_of):
        _text(f"what {op} saves or reads the shape of", name)
    if cost.backward_ms < cost.weight_gradient_ms:
        raise InputError(
            f"the backward of {op} takes {cost.backward_ms} ms, its part for weights "
            f"{cost.weight_gradient_ms}"
        )
    return cost


def _loss(data: dict[str, Any] | None) -> LossCost | None:
    """Of a file that an earlier version wrote, none."""
    if data is None:
        return None
    loss = LossCost(**{**data, "unused": tuple(data.get("unused", ()))})
    _check_units("the loss", loss)
    for name in loss.unused:
        _text("an output that the loss leaves unused", name)
    return loss


def _launch(data: dict[str, Any] | None) -> Launch | None:
    """Of a file that an earlier version wrote, none."""
    if data is None:
        return None
    launch = Launch(**data)
    _check_units("launching", launch)
    number("the serial share of launching", launch.serial, 0, 1)
    return launch


def _network(data: dict[str, Any]) -> Network:
    pairs = {}
    for text, link in data["pairs"].items():
        source, target = map(int, text.split(">"))
        pairs[source, target] = _link(f"the link {text}", link)
    return Network(_link("the link", data["link"]), pairs)


def _link(what: str, data: dict[str, Any]) -> Link:
    latency_ms = number(f"latency_ms of {what}", data["latency_ms"])
    bytes_per_ms = data["bytes_per_ms"]
    if bytes_per_ms is None:
        return Link(latency_ms, math.inf)
    return Link(latency_ms, number(f"bytes_per_ms of {what}", bytes_per_ms, 1, MOST_BYTES))


def _link_data(link: Link) -> dict[str, float | None]:
    copies = not math.isinf(link.bytes_per_ms)  # else JSON has no number for it
    return {
        "latency_ms": link.latency_ms,
        "bytes_per_ms": link.bytes_per_ms if copies else None,
    }


def _check_units(what: str, cost: OpCost | LossCost | Launch) -> None:
    """Fields are called by their units."""
    for field in dataclasses.fields(cost):
        if field.name.endswith("ms"):
            number(f"{field.name} of {what}", getattr(cost, field.name))
        elif field.name.endswith("bytes"):
            whole(f"{field.name} of {what}", getattr(cost, field.name))


def _text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise InputError(f"{what} is a text, not {value!r:.40}")
