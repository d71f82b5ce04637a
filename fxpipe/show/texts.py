"""Numbers and devices in words, as all that is printed and drawn has them."""

from collections.abc import Sequence


def devices_text(devices: Sequence[str]) -> str:
    """`2 CPU lanes`, or the devices by name."""
    if set(devices) == {"cpu"}:
        return plural(len(devices), "CPU lane")
    return ", ".join(devices)


def bytes_text(n_bytes: float) -> str:
    """Bytes in the unit that reads best, as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.2f} GiB"


def ms_text(ms: float) -> str:
    """Milliseconds to three digits, as `1.23 ms`; seconds from 10,000 ms on."""
    if ms >= 10_000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.{2 if ms < 10 else 1 if ms < 100 else 0}f} ms"


def plural(n: int, noun: str, ending: str = "s") -> str:
    """`1 stage`, or `2 stages`."""
    return f"{n} {noun}{'' if n == 1 else ending}"


def checked_text(checked: str) -> str:
    """In which modes the graph was compared with the model, as a package has it."""
    if checked == "nothing":
        return "not known to be equal to the model, which was built without memory"
    return f"equal to the model in {checked}"
