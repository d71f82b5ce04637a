"""A package's stage files as modules, under a name that tells the folder and what is in them.

So an edited file is another module at the next load, while pipelines that were loaded before keep
theirs; and a pickled one finds the classes of its stages again, also in another process.
"""

import hashlib
import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TypeVar

from fxpipe.errors import PackageError

T = TypeVar("T")

_PREFIX = "fxpipe_package_"


class _FreshLoader(SourceFileLoader):
    """Compiles the source as it is now: cached bytecode misses edits within the same second."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Finder(MetaPathFinder):
    """Finds the files of loaded packages, for `from .blocks import X` in a stage file too."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX) or not path:
            return None
        return FileFinder(path[0], (_FreshLoader, [".py"])).find_spec(fullname)


def package_of(folder: Path) -> str:
    """Make `folder` importable as a package, as it is now, and say its name."""
    name = _name(folder)
    if name not in sys.modules:
        # The folder's own __init__.py is not run: it is the one that calls load.
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return name


def _name(folder: Path) -> str:
    digest = hashlib.sha256(str(folder).encode())
    for path in sorted(folder.rglob("*.py")):
        with suppress(OSError):  # whoever imports it will say so
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return f"{_PREFIX}{digest.hexdigest()[:12]}"


def module_of(package: str, file: str) -> ModuleType:
    """The module of a file of the package, as `stage_0.py`."""
    return importlib.import_module(f"{package}.{Path(file).stem}")


def unpickled(kind: type[T], folder: str, package: str) -> T:
    """An empty object of `kind`, once the `package` that its stages are of can be imported.

    Raises PackageError if what is in `folder` is not that any more.
    """
    if package not in sys.modules and package_of(Path(folder)) != package:
        raise PackageError(
            f"the pipeline was pickled with the stages of the package in {folder}, which is not "
            "there any more, or has other code since: put it back; or fxpipe.load the package "
            "where it is, and give it the state_dict(), which needs no code"
        )
    return object.__new__(kind)
