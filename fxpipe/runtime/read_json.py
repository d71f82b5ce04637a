"""Dataclasses from JSON, every field checked, and which JSON file is of which kind."""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

from fxpipe.errors import InputError, PackageError


def refuse_another(path: Path, key: str, what: str) -> None:
    """Raise InputError if a file is there to write to that is no `what`, whose JSON has `key`."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or key not in found:
        raise InputError(
            f"{path} is there already, and is no {what}: name another file, or move it away"
        )


def read(kind: Any, data: Any, where: str) -> Any:
    """`data` from JSON as `kind`, which is a dataclass, tuple, union or plain type.

    Raises PackageError that names the field; `where` is what it is in.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        fields = typing.get_type_hints(kind)
        if not isinstance(data, dict) or set(data) != set(fields):
            keys = set(data) if isinstance(data, dict) else set()
            found = {"missing": set(fields) - keys, "unknown": keys - set(fields)}
            told = [f"{what} fields {sorted(names)}" for what, names in found.items() if names]
            raise PackageError(f"{where}: {', '.join(told)}")
        values = {name: read(fields[name], data[name], f"{where}: {name}") for name in fields}
        try:
            return typing.cast(Any, kind)(**values)
        except ValueError as error:
            raise PackageError(f"{where}: {error}") from error
    if origin is tuple:
        if isinstance(data, list):
            return tuple(read(args[0], item, f"{where}[{k}]") for k, item in enumerate(data))
    elif origin is types.UnionType:
        options = [option for option in args if _fits(option, data)]
        if options:
            return data
        nested = [option for option in args if dataclasses.is_dataclass(option)]
        if nested and isinstance(data, dict):
            return read(nested[0], data, where)
    elif origin is typing.Literal:
        if data in args:
            return data
    elif origin is dict:
        if isinstance(data, dict):
            return data
    elif _fits(kind, data):
        return float(data) if kind is float else data
    raise PackageError(f"{where}: expected {getattr(kind, '__name__', kind)}, found {data!r}")


def _fits(kind: Any, data: Any) -> bool:
    if kind is float:
        return isinstance(data, int | float) and not isinstance(data, bool)
    if kind is int:
        return isinstance(data, int) and not isinstance(data, bool)
    return isinstance(data, kind)
