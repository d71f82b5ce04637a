"""What is written stands at its place whole, or not at all."""

from pathlib import Path


def beside(path: Path, what: str) -> Path:
    """Where something is for a while that is to come to `path`, or stood there."""
    path = path.absolute()  # `.` has no name
    return path.with_name(f".{path.name}.{what}")
