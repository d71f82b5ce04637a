"""What each device may hold, as the user says it: `22GiB`, or `22GiB,40GiB` device by device."""

import re

from fxpipe.errors import InputError

_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**k for k, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**k for k, letter in enumerate("kmgt", 1)},
}
_AMOUNT = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def capacities(text: str, n_devices: int) -> tuple[int, ...]:
    """Bytes of each device. One amount stands for all. Raises InputError that names what is wrong.

    Amounts have units: 22GiB is 22 * 1024**3 bytes, 22GB is 22 * 1000**3.
    """
    amounts = tuple(_bytes(item) for item in text.split(","))
    if len(amounts) == 1:
        return amounts * n_devices
    if len(amounts) != n_devices:
        raise InputError(
            f"the memory {text} is of {len(amounts)} devices, but --devices has {n_devices}: write "
            "one amount for all, or one for each"
        )
    return amounts


def _bytes(item: str) -> int:
    match = _AMOUNT.fullmatch(item)
    if match is None or match[2].lower() not in _UNITS:
        raise InputError(
            f"{item.strip()!r} is no amount of memory: write 22GiB, 22GB or 512MiB, or a list with "
            "one for each device"
        )
    n_bytes = int(float(match[1]) * _UNITS[match[2].lower()])
    if n_bytes < 1:
        raise InputError(f"a device with {item.strip()} of memory holds nothing: give it more")
    return n_bytes
