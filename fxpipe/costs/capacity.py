"""What each device may hold, as the user says it: `22GiB`, or `22GiB,40GiB` device by device."""

from fxpipe.costs.numbers import UNLIMITED
from fxpipe.errors import InputError
from fxpipe.runtime.amount import bytes_of


def capacities(text: str, n_devices: int) -> tuple[int, ...]:
    """Bytes of each device. One amount stands for all. Raises InputError, naming what is wrong."""
    # From Python a number may come in its place, which is no amount either.
    amounts = tuple(_bytes(item) for item in str(text).split(","))
    if len(amounts) == 1:
        return amounts * n_devices
    if len(amounts) != n_devices:
        raise InputError(
            f"the memory {text} is of {len(amounts)} devices, but --devices has {n_devices}: write "
            "one amount for all, or one for each"
        )
    return amounts


def _bytes(item: str) -> int:
    n_bytes = bytes_of(item)
    if n_bytes < 1:
        raise InputError(f"a device with {item.strip()} of memory holds nothing: give it more")
    if n_bytes > UNLIMITED:
        raise InputError(
            f"a device with {item.strip():.40} of memory has more than plans count: give it "
            f"{UNLIMITED // 2**40}TiB at most"
        )
    return n_bytes
