"""Writes a safetensors file tensor by tensor: no more than one at a time is in memory.

The library's own writer wants all of them at once, in one process. The format
(https://github.com/huggingface/safetensors#format): eight bytes with the length of the header, the
header as JSON, then the tensors' bytes one after the other.
"""

import ctypes
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fxpipe.errors import WeightsError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNED = 8  # bytes that the header's length is a multiple of


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file's header says of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """How many the tensor takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def entries_of(tensors: Mapping[str, Tensor]) -> list[Entry]:
    """What a header says of them."""
    return aligned(Entry(name, t.dtype, tuple(t.shape)) for name, t in tensors.items())


def aligned(entries: Iterable[Entry]) -> list[Entry]:
    """In an order in which each begins at a multiple of its elements' size."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def refuse_unwritable(entries: Iterable[Entry]) -> None:
    """Raise WeightsError for the first whose name or dtype the format does not know."""
    for entry in entries:
        try:
            entry.name.encode()
        except UnicodeEncodeError as error:
            raise WeightsError(f"safetensors can't hold a name: {error}") from error
        if entry.dtype not in _DTYPES:
            raise WeightsError(f"safetensors can't hold {entry.name}, which is {entry.dtype}")


def bytes_of(tensor: Tensor) -> Tensor:
    """Its elements in order, as bytes on the CPU; a view where it lies so already."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def write(
    path: Path, entries: Sequence[Entry], contents: Iterable[Tensor], metadata: Mapping[str, str]
) -> None:
    """Write the file; `contents` are the bytes of each entry, in their order. Raises OSError."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.n_bytes
        header[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for content in contents:
            if content.numel():
                # Without NumPy torch gives no buffer; `content` lives on while this one is read.
                file.write((ctypes.c_ubyte * content.numel()).from_address(content.data_ptr()))
            del content  # before the next one is made
        file.flush()
        os.fsync(file.fileno())
