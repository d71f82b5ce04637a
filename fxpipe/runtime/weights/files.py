"""Safetensors files as one checkpoint, of which single tensors are read.

A file, or Hugging Face's shards with their index, or several files side by side, as in a package's
`weights`. Headers say keys and shapes, so nothing is read of a tensor that nobody asks for.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import WeightsError

_INDEX = ".safetensors.index.json"


class WeightFiles:
    """The tensors of the files at `path` by key. Files are opened when one of theirs is wanted.

    `path` is a .safetensors file, an index, or a folder with an index or with .safetensors files;
    model.safetensors goes before an index that does not name it. Raises WeightsError if it is
    none of these, or a file can't be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}
        self._files = self._located(Path(path))

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def keys(self) -> Collection[str]:
        """The names of all tensors."""
        return self._files.keys()

    def shape(self, key: str) -> torch.Size:
        """The shape of a tensor, from its file's header."""
        return torch.Size(self._in_file(key, "get_slice").get_shape())

    def read(self, key: str) -> Tensor:
        """The tensor itself, on the CPU: a view of the file, as far as the system allows."""
        tensor: Tensor = self._in_file(key, "get_tensor")
        return tensor

    def _located(self, path: Path) -> Mapping[str, Path]:
        """The file that each key is in."""
        if path.is_dir():
            indexes = sorted(path.glob(f"*{_INDEX}"))
            if len(indexes) > 1:
                raise WeightsError(f"{path} has {len(indexes)} indexes: give one of them by name")
            if indexes:
                return self._read_newer(indexes[0])
            return self._read_headers(sorted(path.glob("*.safetensors")), path)
        if path.name.endswith(_INDEX):
            return _read_index(path)
        return self._read_headers([path], path)

    def _read_newer(self, index: Path) -> Mapping[str, Path]:
        """Of an index's shards and a file of all that stands beside them, what was written last.

        That is the file: who writes shards removes it. transformers takes it as well.
        """
        located = _read_index(index)
        whole = index.with_name(index.name.removesuffix(".index.json"))
        if whole.exists() and whole not in located.values():
            return self._read_headers([whole], whole)
        return located

    def _read_headers(self, files: Collection[Path], path: Path) -> dict[str, Path]:
        if not files:
            raise WeightsError(
                f"{path} has no .safetensors files: give a file or a folder with one, or load "
                "others with load_state_dict(torch.load(...))"
            )
        located: dict[str, Path] = {}
        for file in files:
            for key in self._opened(file).keys():  # noqa: SIM118
                if key in located:
                    raise WeightsError(
                        f"{path} has {key} twice, in {located[key].name} and in {file.name}: give "
                        "the one file that is wanted"
                    )
                located[key] = file
        return located

    def _in_file(self, key: str, method: str) -> Any:
        from safetensors import SafetensorError

        file = self._files[key]
        try:
            return getattr(self._opened(file), method)(key)
        except SafetensorError as error:
            raise WeightsError(f"{file}: {key} can't be read: {error}") from error

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            try:
                from safetensors import SafetensorError, safe_open
            except ImportError as error:
                raise WeightsError(
                    f"{file}: reading it needs the package safetensors: pip install safetensors"
                ) from error
            try:
                handle = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{file} can't be read as safetensors: {error}") from error
            self._open[file] = self._stack.enter_context(handle)
        return self._open[file]


def _read_index(path: Path) -> dict[str, Path]:
    """Of `model.safetensors.index.json`: the shard beside it that each key is in."""
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = set(map(str, places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is no index of safetensors files: {error}") from error
    strange = [name for name in names if Path(name).name != name]
    if strange:
        raise WeightsError(f"{path}: {strange[0]!r} is not the name of a file beside it")
    missing = sorted(name for name in names if not (path.parent / name).exists())
    if missing:
        raise WeightsError(
            f"{path} names {len(missing)} files that are not there: {', '.join(missing[:8])}"
        )
    return {key: path.parent / name for key, name in places.items()}
