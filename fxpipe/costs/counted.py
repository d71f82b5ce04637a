"""How much memory ops need at once, beyond what was there before."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.memory import dense_tensors, storage_of
from fxpipe.runtime import stream

T = TypeVar("T")


def bytes_added(first: Callable[[], T], then: Callable[[T], object], device: torch.device) -> int:
    """The most bytes that `then`, given what `first` gives, holds beside what that has left.

    What it lets go of makes room, as what a backward has used of the graph that `first` made.
    """
    with _Made() as made:
        given = first()
        left = made.peak = made.held_bytes
        stream.reset_peak_bytes(device)
        before = stream.peak_bytes(device)
        then(given)
    after = stream.peak_bytes(device)
    return made.peak - left if before is None or after is None else after - before


def most_bytes(run: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What `run` gives, and the most bytes that its ops held of what they made.

    A CUDA device's allocator tells, which knows of the kernels' own scratch memory too; elsewhere,
    as with fake tensors, it is the tensors that were made, while they lived.
    """
    stream.reset_peak_bytes(device)
    before = stream.peak_bytes(device)
    with _Made() as made:
        result = run()
    after = stream.peak_bytes(device)
    return result, made.peak if before is None or after is None else after - before


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what ops make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._held: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_of(tensor) for tensor in dense_tensors((args, kwargs))}
        for tensor in dense_tensors(result):
            address = storage_of(tensor)
            if address not in given and address not in self._held:
                storage = tensor.untyped_storage()
                self._held[address] = storage.nbytes()
                weakref.finalize(storage, self._held.pop, address, None)
        self.peak = max(self.peak, self.held_bytes)
        return result

    @property
    def held_bytes(self) -> int:
        """What is there of it now."""
        return sum(self._held.values())
