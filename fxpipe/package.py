"""A compiled package in memory, and how it is written to disk."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fxpipe.errors import PackageError
from fxpipe.ir import Capture, Chain, PackageFiles, Plan, Profile, Wiring
from fxpipe.runtime.manifest import Manifest

_EXTRA = ("plan.json", "buffers.pt", "__pycache__")


@dataclass(frozen=True, slots=True)
class Package:
    """All that compiling a model gave. `timings` are seconds by pass."""

    manifest: Manifest
    capture: Capture
    profile: Profile
    chain: Chain
    plan: Plan
    wiring: Wiring
    emitted: PackageFiles
    timings: Mapping[str, float]

    @property
    def files(self) -> Mapping[str, str]:
        """The text of each file by name."""
        return self.emitted.files

    def write(self, path: str | Path) -> Path:
        """Write the package to the folder `path`, replacing a package of ours whole.

        Files are written beside it and moved, so that `path` is at all times the old package, the
        new one, or absent. Raises PackageError if `path` is anything else than a package.
        """
        path = Path(path)
        refuse_foreign(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
                new, old = Path(folder) / "new", Path(folder) / "old"
                new.mkdir()
                for name, text in self.emitted.files.items():
                    (new / name).write_text(text)
                if self.emitted.buffers:
                    torch.save(dict(self.emitted.buffers), new / "buffers.pt")
                if path.exists():
                    path.rename(old)
                try:
                    new.rename(path)
                except OSError:
                    if old.exists():
                        old.rename(path)
                    raise
        except OSError as error:
            raise PackageError(f"{path} can't be written: {error.strerror or error}") from error
        return path


def refuse_foreign(path: str | Path) -> None:
    """Raise PackageError if `path` exists and was not written by us.

    Ours is a folder whose plan.json is one and which holds nothing but what we write.
    """
    path = Path(path)
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir() or path.is_symlink():
        raise PackageError(f"{path} exists and is no folder: choose another output folder")
    found = sorted(entry.name for entry in path.iterdir())
    if not found:
        return
    if "plan.json" not in found:
        raise PackageError(
            f"{path} exists and is no fxpipe package (it has no plan.json): "
            "choose another output folder, or remove it yourself"
        )
    ours = {*Manifest.from_json((path / "plan.json").read_text()).files, *_EXTRA}
    foreign = [name for name in found if name not in ours]
    if foreign:
        raise PackageError(
            f"{path} is an fxpipe package but also holds {', '.join(foreign)}, which would be "
            "lost: move that elsewhere, or choose another output folder"
        )
