"""The files of a checkpoint: which are torch's, and whether they are there whole."""

import re
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from fxpipe.errors import WeightsError
from fxpipe.outputs import is_free, standing

# `.metadata` is written last, once all else is there; rank R writes `__R_0.distcp` and so on.
_TORCHS = re.compile(r"\.metadata|__\d+_\d+\.distcp")


def whole_metadata(folder: Path) -> Metadata:
    """What a checkpoint says of itself, once its files were found as long as it says they are.

    Raises WeightsError if they aren't, or it can't be read. Nothing of the files is read.
    """
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except OSError as error:
        raise WeightsError(f"it is no whole checkpoint: {error}") from error
    except Exception as error:  # a pickle that is damaged fails in any way
        raise _not_whole(f".metadata is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise _not_whole(".metadata is damaged: it does not say which tensor is where")
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    for name, end in sorted(ends.items()):
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise _not_whole(f"{name} can't be read ({error.strerror})") from error
        if size < end:
            raise _not_whole(f"{name} is cut off: it has {size} bytes of {end}")
    return metadata


def _not_whole(why: str) -> WeightsError:
    return WeightsError(
        f"it is no whole checkpoint: {why}. Copy it anew from where it is whole, or load another"
    )


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint is there, with all its files."""
    try:
        whole_metadata(folder)
    except WeightsError:
        return False
    return True


def refuse_loss(path: Path) -> None:
    """Raise WeightsError if something else than a checkpoint is at `path`: it would be replaced."""
    folder = standing(path)
    if is_free(folder):
        return
    if not is_whole(folder):
        raise WeightsError("what is there is no whole checkpoint: move it, or save elsewhere")
    others = sorted(each.name for each in folder.iterdir() if not _TORCHS.fullmatch(each.name))
    if others:
        more = f" and {len(others) - 8} more" if len(others) > 8 else ""
        raise WeightsError(
            f"beside a checkpoint it holds {', '.join(others[:8])}{more}, which would be lost: "
            "move that elsewhere, or save into a folder of its own"
        )


def refuse_scattered(folder: Path) -> None:
    """Raise WeightsError unless all files that ranks wrote are here."""
    stored = FileSystemReader(folder).read_metadata().storage_data
    names = {place.relative_path for place in stored.values()}
    missing = sorted(names - {path.name for path in folder.iterdir()})
    if missing:
        raise WeightsError(
            f"{', '.join(missing[:8])} is not where rank 0 looks: all ranks write into one folder, "
            "on a file system that they share"
        )
