"""The user's own code: imported, run, and what it raises told with the line that raised it."""

import importlib
import importlib.util
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fxpipe.errors import FxpipeError, TargetError

_FXPIPE = Path(__file__).resolve().parent


@contextmanager
def running(what: str, folder: str, alone: bool = False) -> Iterator[None]:
    """Make `folder` importable; turn an exception of the code in it into TargetError.

    Any exception, as of a library that it calls, where the user's code runs `alone`.
    """
    with _importable(folder):
        try:
            yield
        except FxpipeError:
            raise
        except (Exception, SystemExit) as error:
            where = _own_line(error, folder)
            if where is None and not alone:
                raise
            raise TargetError(f"{what} raised {_told(error)}{_below(where)}") from error


def import_file(file: str, folder: str) -> ModuleType:
    """The file as a module, while its `folder` is importable. Raises TargetError."""
    path = Path(file)
    resolved = path.resolve()
    # The stem, as `import model` would have it, unless that means another module already: classes
    # of the model's outputs then have names that can be imported where this file is.
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) != str(resolved):
        name = f"fxpipe_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    linecache.checkcache(str(resolved))
    try:
        with _importable(folder):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        refused = _not_importable(file, error, folder)
        if isinstance(error, ImportError) and "relative import" in str(error):
            module_name = f"{resolved.parent.name}.{path.stem}"
            raise TargetError(
                f"{refused}\nA file has no package: from the folder {resolved.parent.parent}, give "
                f"{module_name} or {module_name}:factory as TARGET"
            ) from error
        raise refused from error
    return module


def import_module(name: str, folder: str) -> ModuleType:
    """The module of that name, while `folder` is importable. Raises TargetError."""
    try:
        with _importable(folder):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name + ".").startswith(missing + "."):
            raise TargetError(
                f"there is no module {missing} in the current folder or the installed packages: "
                f"for a file, write {name.replace('.', '/')}.py"
            ) from error
        raise _not_importable(name, error, folder) from error


def shown_line(file: str, line: int) -> str:
    """How a line of a file is told: where it is, and its text."""
    shown = os.path.relpath(file)
    shown = file if shown.startswith("..") else shown
    return f"{shown}, line {line}: {linecache.getline(file, line).strip()}"


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = before


def _told(error: BaseException) -> str:
    message = error.msg if isinstance(error, SyntaxError) else error
    message = str(message).partition("\nException raised from")[0]  # then torch's C++ frames
    return f"{type(error).__name__}: {message}".rstrip(": \n")


def _own_line(error: BaseException, folder: str) -> str | None:
    """The last line of the user's code, which lies below `folder`, that the error came through."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return shown_line(error.filename, error.lineno or 0)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = "site-packages" in path.parts or path.is_relative_to(_FXPIPE)
        if path.is_relative_to(folder) and not installed:
            return shown_line(frame.filename, frame.lineno or 0)
    return None


def _not_importable(name: str, error: BaseException, folder: str) -> TargetError:
    where = _own_line(error, folder)
    return TargetError(f"{name} can't be imported: {_told(error)}{_below(where)}")


def _below(where: str | None) -> str:
    return f"\n  {where}" if where else ""
