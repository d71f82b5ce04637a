"""What the backward of one op keeps: the storages that its forward saves, and whose they are."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fxpipe.costs.counted import most_bytes
from fxpipe.memory import storage_of

# An argument's, by its place among the tensors given, the result's own, or one nothing else has.
Owner = int | Literal["result"] | None


def computed(compute: Callable[[], Any], device: torch.device) -> tuple[Any, int, Sequence[Tensor]]:
    """The result, the bytes that this takes at its fullest, and the tensors that it saves."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        # An op in place saves its result, by which the graph would hold itself, for good.
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result, n_bytes = most_bytes(compute, device)
    return result, n_bytes, saved


def owners(
    saved: Sequence[Tensor],
    given: Sequence[Tensor],
    result: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[tuple[Owner, int], ...]:
    """Each storage among `saved` once: whose it is and its bytes; parameters are left out."""
    places: dict[int, Owner] = {storage_of(t): "result" for t in result}
    places.update({storage_of(tensor): place for place, tensor in enumerate(given)})
    storages = {storage_of(t): t.untyped_storage().nbytes() for t in saved}
    for tensor in parameters:
        storages.pop(storage_of(tensor), None)
    return tuple((places.get(address), n_bytes) for address, n_bytes in storages.items())
