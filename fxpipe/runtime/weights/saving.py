"""Weights as one safetensors file, or as Hugging Face's shards with their index; whole or not.

Processes write together: each its own shards, side by side. One file is written by the first of
them, and the others hand it their tensors one by one.
"""

import json
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fxpipe.errors import InputError, WeightsError
from fxpipe.runtime import amount
from fxpipe.runtime.weights.tensor_file import (
    Entry,
    aligned,
    bytes_of,
    entries_of,
    refuse_unwritable,
    write,
)

T = TypeVar("T")

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_METADATA = {"format": "pt"}  # transformers asks for it


class Writers(Protocol):
    """The processes that write together."""

    world_rank: int
    world_size: int
    replica: int

    def gather_world(self, mine: T, /) -> list[T]:
        """What each gives, in order of the ranks."""
        ...

    def hand_over(self, tensor: Tensor, source: int, target: int) -> None:
        """Fill `tensor` on rank `target` with what it holds on rank `source`; both call it."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """All of one of which replicas may hold shares; those that do call it together."""
        ...


class Alone:
    """One process."""

    world_rank = 0
    world_size = 1
    replica = 0

    def gather_world(self, mine: T, /) -> list[T]:
        """Its own."""
        return [mine]

    def hand_over(self, tensor: Tensor, source: int, target: int) -> None:
        """Nobody else holds anything."""

    def whole(self, tensor: Tensor) -> Tensor:
        """It is."""
        return tensor


@dataclass(frozen=True, slots=True)
class _File:
    """Its name, the rank that writes it, and what is in it."""

    name: str
    writer: int
    entries: Sequence[Entry]


def save(
    path: Path, tensors: Mapping[str, Tensor], max_shard_size: int | str, writers: Writers
) -> None:
    """Write `tensors`, and those of the other processes, to `path`.

    Replicas give the same ones, the first of them writes; else no two processes give one.

    A path that ends in .safetensors is one file. Any other is a folder: it gets shards of at most
    `max_shard_size` bytes, or one tensor, with an index, or `model.safetensors` if that is enough.
    What else is in the folder stays. Raises InputError and WeightsError, alike on all.
    """
    limit = max_shard_size
    limit = amount.bytes_of(limit) if isinstance(limit, str) else limit
    if limit < 1:
        raise InputError(f"max_shard_size is {max_shard_size}: give a number of bytes, or '5GB'")
    held = writers.gather_world([] if writers.replica else entries_of(tensors))
    refuse_unwritable(chain(*held))
    one = path.suffix == ".safetensors"
    files = [_File(path.name, 0, aligned(chain(*held)))] if one else _shards(held, limit)
    homes = {entry.name: rank for rank, entries in enumerate(held) for entry in entries}
    folder = path.parent if one else path
    beside = folder / f".{path.name}.writing"
    first = writers.world_rank == 0

    def write_files() -> None:
        for file in files:
            contents = _contents(file, homes, tensors, writers)
            try:
                if file.writer == writers.world_rank:
                    write(beside / file.name, file.entries, contents, _METADATA)
            finally:
                deque(contents, maxlen=0)  # what is left is handed over all the same

    def put_in_place() -> None:
        if not one:
            _clear(folder, [beside / file.name for file in files])
        for file in files:
            (beside / file.name).replace(folder / file.name)
        if len(files) > 1:
            (beside / _INDEX).write_text(_index(files))
            (beside / _INDEX).replace(folder / _INDEX)

    try:
        _agree(writers, path, lambda: _begin(beside) if first else None)
        _agree(writers, path, write_files)
        _agree(writers, path, lambda: put_in_place() if first else None)
    finally:
        if first:
            shutil.rmtree(beside, ignore_errors=True)


def _shards(held: Sequence[Sequence[Entry]], limit: int) -> list[_File]:
    """Each rank's tensors in files of at most `limit` bytes, or one tensor."""
    shards: list[tuple[int, list[Entry]]] = []
    for rank, entries in enumerate(held):
        room = -1
        for entry in entries:
            if entry.n_bytes > room:
                shards.append((rank, []))
                room = limit
            shards[-1][1].append(entry)
            room -= entry.n_bytes
    shards = shards or [(0, [])]
    n = len(shards)
    names = [f"model-{k:05}-of-{n:05}.safetensors" for k in range(1, n + 1)] if n > 1 else [_WHOLE]
    return [_File(name, *shard) for name, shard in zip(names, shards, strict=True)]


def _contents(
    file: _File, homes: Mapping[str, int], tensors: Mapping[str, Tensor], writers: Writers
) -> Iterator[Tensor]:
    """The bytes of each tensor of the file, where it is written; those held here go there.

    No more than one is in memory that was not before.
    """
    for entry in file.entries:
        content = _content(entry, homes[entry.name], file.writer, tensors, writers)
        if content is not None:
            yield content
        del content


def _content(
    entry: Entry, home: int, writer: int, tensors: Mapping[str, Tensor], writers: Writers
) -> Tensor | None:
    here = writers.world_rank
    tensor = writers.whole(tensors[entry.name]) if entry.name in tensors else None
    if here not in (home, writer):
        return None
    if home == here:
        assert tensor is not None
        content = bytes_of(tensor)
    else:
        content = torch.empty(entry.n_bytes, dtype=torch.uint8)
    if home != writer:
        writers.hand_over(content, home, writer)
    return content


def _index(files: Sequence[_File]) -> str:
    """What `model.safetensors.index.json` says: which tensor is in which file."""
    places = {entry.name: file.name for file in files for entry in file.entries}
    n_bytes = sum(entry.n_bytes for file in files for entry in file.entries)
    index = {"metadata": {"total_size": n_bytes}, "weight_map": places}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _begin(beside: Path) -> None:
    """An empty folder, without what a process that died has left there."""
    if beside.exists():
        shutil.rmtree(beside)
    beside.mkdir(parents=True)


def _clear(folder: Path, new: Sequence[Path]) -> None:
    """Remove the weights of before, once all of the new ones are seen from here.

    Were some of both there, they would be taken for one whole.
    """
    for path in new:
        path.stat()
    for old in sorted(folder.iterdir(), reverse=True):
        if _OURS.fullmatch(old.name):
            old.unlink()


def _agree(writers: Writers, path: Path, run: Callable[[], None]) -> None:
    """Run it and hear how the others fared. Raises WeightsError, alike on all, if one failed."""
    problem = None
    try:
        run()
    except OSError as error:
        problem = str(error)
    problems = [f"rank {rank}: {p}" for rank, p in enumerate(writers.gather_world(problem)) if p]
    if problems and writers.world_size == 1:
        raise WeightsError(f"{path} can't be written: {problem}")
    if problems:
        raise WeightsError(
            "\n  ".join([f"{path} can't be written:", *problems])
            + "\nranks write shards into one folder on a file system that they share; one file, "
            "whose name ends in .safetensors, is written by rank 0 alone"
        )
