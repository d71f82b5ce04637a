"""Numbers that a file gives, each within what sums and products of many of them can hold."""

from fxpipe.errors import InputError

MOST_MS = 1e9  # twelve days
# 16 TiB of one op. Bytes are summed over ops and micro-batches, in 64 bits.
MOST_BYTES = 2**44
UNLIMITED = 2**62  # what a device without a limit holds


def number(what: str, value: object, least: float = 0, most: float = MOST_MS) -> float:
    """`value`, from JSON. Raises InputError that names it if it is no number from here to there."""
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise _wrong(what, "a number", value, least, most)
    return float(value)  # type: ignore[arg-type]


def whole(what: str, value: object, least: int = 0, most: int = MOST_BYTES) -> int:
    """The same of a whole number."""
    if type(value) is not int or not least <= value <= most:
        raise _wrong(what, "a whole number", value, least, most)
    return value


def _wrong(what: str, kind: str, value: object, least: float, most: float) -> InputError:
    return InputError(f"{what} is {kind} from {least:g} to {most:g}, not {value!r:.40}")
