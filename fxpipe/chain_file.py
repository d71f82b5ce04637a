"""A bare chain in place of a model: costs by block in a JSON file, to compare planners by.

    {"blocks": [{"forward_ms": 1, "input_gradient_ms": 1, "weight_gradient_ms": 1,
                 "saved_bytes": 8, "parameter_bytes": 8, "output_bytes": 8}, ...],
     "skips": [{"from": 0, "to": 5, "bytes": 8}], "capacity_bytes": 1000,
     "optimizer_bytes_per_parameter_byte": 3, "latency_ms": 0.01, "bandwidth_gb_s": 300}

Skips, the capacity (then there is no limit) and the optimizer may be left out. Bytes are whole
numbers. Block k hands `output_bytes` to block k + 1; a skip goes from the end of one block to a
later one. A stage holds its parameters, and `optimizer_...` times as many bytes of gradients and
optimizer states.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpipe.costs.numbers import MOST_BYTES, UNLIMITED, number
from fxpipe.errors import InputError
from fxpipe.ir import Block, Chain, Link, Network, Value

_BLOCK = (
    "forward_ms",
    "input_gradient_ms",
    "weight_gradient_ms",
    "saved_bytes",
    "parameter_bytes",
    "output_bytes",
)
_SKIP = ("from", "to", "bytes")
_REQUIRED = ("blocks", "latency_ms", "bandwidth_gb_s")
_FACTOR = "optimizer_bytes_per_parameter_byte"
_BYTES_PER_MS = 1e6  # of one GB/s
_MOST_FACTOR = 100
_BANDWIDTH = 1e-6, 1e9  # GB/s


@dataclass(frozen=True, slots=True)
class ChainFile:
    """What the file says. `training_factor` is `optimizer_bytes_per_parameter_byte`."""

    chain: Chain
    capacity_bytes: int
    training_factor: float
    network: Network


def load_chain(path: str | Path) -> ChainFile:
    """Read a chain's file. Raises InputError that names what is wrong and where."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"the chain {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from error
    try:
        return _chain_file(data)
    except InputError as error:
        raise InputError(f"the chain {path}: {error}") from error


def _chain_file(data: Any) -> ChainFile:
    _check_fields("the file", data, _REQUIRED, ("skips", "capacity_bytes", _FACTOR))
    blocks, skips = data["blocks"], data.get("skips", [])
    if not isinstance(blocks, list) or not blocks or not isinstance(skips, list):
        raise InputError("`blocks` is a list of at least one block, `skips` a list")
    for k, block in enumerate(blocks):
        _check_fields(f"block {k}", block, _BLOCK)
        for name in _BLOCK:
            check = number if name.endswith("_ms") else _bytes
            check(f"{name} of block {k}", block[name])
    end = len(blocks) - 1
    # That what is given to the model wants a gradient makes block 0 compute one, as the costs say.
    values = [Value("input", 0, -1, (0,), gradient=True)]
    for k, block in enumerate(blocks[:-1]):
        values.append(Value(f"output {k}", int(block["output_bytes"]), k, (k + 1,), gradient=True))
    for k, skip in enumerate(skips):
        _check_fields(f"skip {k}", skip, _SKIP)
        source, target = skip["from"], skip["to"]
        if not (type(source) is type(target) is int and 0 <= source < target <= end):
            raise InputError(
                f"skip {k} goes from block {source} to block {target}: it goes to a later one of "
                f"the blocks 0 to {end}"
            )
        size = _bytes(f"bytes of skip {k}", skip["bytes"])
        values.append(Value(f"skip {k}", size, source, (target,), gradient=True))
    bandwidth = number("bandwidth_gb_s", data["bandwidth_gb_s"], *_BANDWIDTH)
    latency_ms = number("latency_ms", data["latency_ms"])
    capacity = _bytes("capacity_bytes", data.get("capacity_bytes", UNLIMITED), 1, UNLIMITED)
    return ChainFile(
        chain=Chain(
            tuple(_block(k, block) for k, block in enumerate(blocks)),
            tuple(values),
            (True,) * len(blocks),
        ),
        capacity_bytes=capacity,
        training_factor=number(_FACTOR, data.get(_FACTOR, 0), most=_MOST_FACTOR),
        network=Network(Link(latency_ms, bandwidth * _BYTES_PER_MS)),
    )


def _bytes(what: str, value: Any, least: int = 0, most: int = MOST_BYTES) -> int:
    """So many, which JSON may also write as 1e6."""
    if not number(what, value, least, most).is_integer():
        raise InputError(f"{what} is a whole number, not {value!r:.40}")
    return int(value)


def _block(k: int, block: dict[str, Any]) -> Block:
    return Block(
        ops=(f"block {k}",),
        forward_ms=block["forward_ms"],
        backward_ms=block["input_gradient_ms"] + block["weight_gradient_ms"],
        weight_gradient_ms=block["weight_gradient_ms"],
        saved=((f"saved by {k}", int(block["saved_bytes"])),),
        parameters=((f"parameters of {k}", int(block["parameter_bytes"])),),
    )


def _check_fields(
    what: str, data: Any, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    if not isinstance(data, dict):
        raise InputError(f"{what} is an object with {', '.join(required)}, not {data!r}")
    missing = [name for name in required if name not in data]
    unknown = [name for name in data if name not in (*required, *optional)]
    if missing or unknown:
        wrong = [f"lacks {', '.join(missing)}"] if missing else []
        wrong += [f"has {', '.join(unknown)}, which mean nothing here"] if unknown else []
        raise InputError(f"{what} {' and '.join(wrong)}")
