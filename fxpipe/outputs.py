"""What is written stands at its place whole, or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fxpipe.errors import InputError


def beside(path: Path, what: str) -> Path:
    """Where something is for a while that is to come to `path`, or stood there."""
    path = path.absolute()  # `.` has no name
    return path.with_name(f".{path.name}.{what}")


def why_no_place(path: Path) -> str | None:
    """Why there can't be anything new at `path`, if there can't; folders above it are made."""
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        return f"{above} is no folder"
    return None if os.access(above, os.W_OK) else f"{above} may not be written to"


def check_file(path: Path) -> None:
    """Raise InputError if no file can be written at `path`."""
    why = "it is a folder: name a file in it" if path.is_dir() else None
    if why is None and not _is_device(path):
        why = why_no_place(path)
    if why is not None:
        raise InputError(f"{path} can't be written: {why}")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file for the block to write, which then takes the place of `path`. Raises InputError."""
    check_file(path)
    # It ends as `path` does, which tells some writers what to write.
    writing = path if _is_device(path) else beside(path.resolve(), f"writing{path.suffix}")
    try:
        writing.parent.mkdir(parents=True, exist_ok=True)
        yield writing
        if writing != path:
            writing.replace(path.resolve())
    except OSError as error:
        raise InputError(f"{path} can't be written: {error.strerror or error}") from error
    finally:
        if writing != path:
            writing.unlink(missing_ok=True)


def _is_device(path: Path) -> bool:
    """Whether it is one such as /dev/stdout, which is written to and not replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()
