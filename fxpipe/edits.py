"""Which files of a package are still as they were written, and what writing over it would lose."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fxpipe.errors import PackageError
from fxpipe.outputs import real, why_no_place
from fxpipe.runtime.manifest import Manifest

PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class Edits:
    """Files that are not what was written: changed, gone, and not of ours."""

    edited: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


def sealed(manifest: Manifest, folder: Path) -> Manifest:
    """The manifest with the hash of each file in `folder`, and of itself as plan.json."""
    hashes = {name: _hash_of_file(folder / name) for name in _files(folder)}
    bare = dataclasses.replace(manifest, files=hashes)
    return dataclasses.replace(manifest, files=hashes | {PLAN: _hash_of_plan(bare.to_json())})


def edits(folder: str | Path) -> Edits:
    """What was changed by hand in the package in `folder`.

    Raises PackageError if it is none, or a file of it can't be read.
    """
    folder = Path(folder)
    try:
        plan = (folder / PLAN).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PackageError(f"{folder} is no package of fxpipe: its {PLAN}: {error}") from error
    written = _hashes(folder, plan)
    found = set(_files(folder))
    try:
        now = {name: _hash_of_file(folder / name) for name in sorted(found & set(written))}
    except OSError as error:
        raise PackageError(
            f"{error.filename} can't be read ({error.strerror}), so nobody knows whether it was "
            "edited: put the file there that was written, or remove what is in its place"
        ) from error
    if PLAN in written:
        now[PLAN] = _hash_of_plan(plan)
    return Edits(
        edited=tuple(sorted(name for name in now if now[name] != written[name])),
        missing=tuple(sorted(set(written) - found)),
        added=tuple(sorted(found - {*written, PLAN})),
    )


def _hashes(folder: Path, plan: str) -> dict[str, str]:
    """What a plan.json says that was written, whichever fxpipe wrote it."""
    try:
        data = json.loads(plan)
        # Other tools have a plan.json too: ours says which version wrote it.
        _version, files = data["fxpipe"], data["files"]
        return dict(files)
    except (ValueError, TypeError, KeyError) as error:
        raise PackageError(
            f"{folder / PLAN} does not say which files are fxpipe's: choose another output "
            "folder, or move or remove it"
        ) from error


def refuse_loss(path: str | Path) -> None:
    """Raise PackageError if a package can't be written to `path`, or would replace what isn't ours.

    What may be replaced is an empty folder, or one of ours with no file added and none changed.
    """
    path = Path(path)
    why = why_no_place(path)
    if why is not None:
        raise PackageError(f"{path} can't be written: {why}")
    if path.is_symlink():
        raise PackageError(
            f"{path} is a link to {path.readlink()}, and would be replaced: give the folder itself"
        )
    if not path.exists():
        return
    if real(path) == Path.cwd():
        raise PackageError(f"{path} is the current folder, which would be replaced: name another")
    if not path.is_dir():
        raise PackageError(f"{path} exists and is no folder: choose another output folder")
    if not any(path.iterdir()):
        return
    if not (path / PLAN).is_file():
        raise PackageError(
            f"{path} exists and is no fxpipe package (it has no plan.json): "
            "choose another output folder, or remove it yourself"
        )
    found = edits(path)
    if found.added:
        raise PackageError(
            f"{path} is an fxpipe package but also holds {', '.join(found.added)}, which would be "
            "lost: move that elsewhere, or choose another output folder"
        )
    if found.edited:
        raise PackageError(
            f"{path} is an fxpipe package with files edited by hand: {', '.join(found.edited)}. "
            "They would be lost: choose another output folder, or move or remove them"
        )


def _files(folder: Path) -> Iterator[str]:
    """The files below `folder` by their names there, but for caches."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if "__pycache__" not in name.parts and (path.is_symlink() or not path.is_dir()):
            yield name.as_posix()


def _hash_of_file(path: Path) -> str:
    """Of a whole file; of weights, which are large, only of the header, where we sign."""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            return hashlib.sha256(file.read(min(length, path.stat().st_size))).hexdigest()
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of_plan(text: str) -> str:
    """Of what a plan.json says, but for this hash itself."""
    data = json.loads(text)
    data["files"].pop(PLAN, None)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
