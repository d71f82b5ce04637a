"""A package's stage files as modules: fresh at each load, under a name of the package's own."""

import hashlib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

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
    """Make `folder` importable as a package, forget what was imported from it, and say its name."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    name = f"{_PREFIX}{digest}"
    for module in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
        del sys.modules[module]
    # The folder's own __init__.py is not run: it is the one that calls load.
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return name


def module_of(package: str, file: str) -> ModuleType:
    """The module of a file of the package, as `stage_0.py`."""
    return importlib.import_module(f"{package}.{Path(file).stem}")
