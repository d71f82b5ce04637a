"""Amounts of memory as people write them: 22GiB is 22 * 1024**3 bytes, 22GB is 22 * 1000**3."""

import re
from decimal import Decimal

from fxpipe.errors import InputError

_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**k for k, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**k for k, letter in enumerate("kmgt", 1)},
}
_AMOUNT = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def bytes_of(text: str) -> int:
    """The bytes that `text` says. Raises InputError."""
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise InputError(f"{text.strip()!r} is no amount of memory: write 22GiB, 22GB or 512MiB")
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])
