"""What is written stands at its place whole, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fxpipe.errors import InputError

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # on Windows
    flock = None  # type: ignore[assignment]


def why_no_place(path: Path) -> str | None:
    """Why there can't be anything new at `path`, if there can't; folders above it are made."""
    try:
        path.exists()
    except OSError as error:  # of a name that is too long
        return error.strerror
    places = (path.absolute(), *path.absolute().parents)
    above = next(folder for folder in places[1:] or places if os.path.lexists(folder))
    if not above.is_dir():
        return f"{above} is no folder"
    return None if os.access(above, os.W_OK) else f"{above} may not be written to"


def check_file(path: Path) -> None:
    """Raise InputError if no file can be written at `path`."""
    why = "it is a folder: name a file in it" if os.path.isdir(path) else None
    if why is None and not _is_device(path):
        why = why_no_place(path)
    if why is not None:
        raise InputError(f"{path} can't be written: {why}")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file for the block to write, which then takes the place of `path`. Raises InputError."""
    check_file(path)
    # It ends as `path` does, which tells some writers what to write.
    writing = path if _is_device(path) else _beside(real(path), f"writing{path.suffix}")
    try:
        writing.parent.mkdir(parents=True, exist_ok=True)
        yield writing
        if writing != path:
            writing.replace(real(path))
    except OSError as error:
        raise InputError(f"{path} can't be written: {error.strerror or error}") from error
    finally:
        if writing != path:
            writing.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """The folder `filled_for(path)` for the block to fill, which then takes the place of `path`.

    At all times `standing(path)` is the old one, or the new one, whole; what a process that was
    killed left beside them is put back or removed. Raises OSError, as where another process fills
    the folder.
    """
    filled = filled_for(path)
    path = real(path)
    above = filled.parent
    above.mkdir(parents=True, exist_ok=True)
    with ExitStack() as filling:
        with _locked(above):
            if filled.exists():
                with _locked(filled, wait=False):
                    pass
            _tidy(path)
            filled.mkdir()
            filling.enter_context(_locked(filled))
        try:
            yield filled
        except BaseException:
            with _locked(above):
                _tidy(path)
            raise
        with _locked(above):
            _put(filled, path)


def _put(filled: Path, path: Path) -> None:
    """Have the filled folder take the place of `path`."""
    try:
        if path.exists():
            path.rename(_before(path))
        filled.rename(path)
    finally:
        _tidy(path)


@contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Let no other process into such a block meanwhile: wait for it to leave, or raise OSError.

    The system lets go of it as a process dies. Where it has no such locks (as in some folders of
    networks), all are let in.
    """
    if flock is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            flock(descriptor, LOCK_EX if wait else LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(error.errno, "another process is writing it") from error
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def real(path: Path) -> Path:
    """Where `path` leads, links followed; one that leads to itself is left as it is."""
    return Path(os.path.realpath(path))


def filled_for(path: Path) -> Path:
    """The folder that is filled before it takes the place of `path`."""
    return _beside(real(path), "writing")


def standing(path: Path) -> Path:
    """Where the folder `path` is: beside its place if a process died as it put a new one there."""
    before = _before(path)
    return before if os.path.exists(before) and is_free(path) else path


def is_free(path: Path) -> bool:
    """Whether nothing is there that would be lost: nothing at all, or an empty folder."""
    return not os.path.exists(path) or (path.is_dir() and not any(path.iterdir()))


def _before(path: Path) -> Path:
    return _beside(real(path), "before")


def _tidy(path: Path) -> None:
    """Put the old folder back if no new one has come to its place; remove all else beside."""
    if standing(path) != path:
        _before(path).rename(path)
    for left in (filled_for(path), _before(path)):
        shutil.rmtree(left, ignore_errors=True)


def _beside(path: Path, what: str) -> Path:
    """Where something is for a while that is to come to `path`, or stood there."""
    return path.parent / f".{path.name}.{what}"


def _is_device(path: Path) -> bool:
    """Whether it is one such as /dev/stdout, which is written to and not replaced."""
    return os.path.exists(path) and not path.is_file() and not path.is_dir()
