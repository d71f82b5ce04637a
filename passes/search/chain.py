"""A chain as the arrays that the search's kernels take."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir import Chain, Network
from fxpipe.passes.partition_costs import crossing

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ChainArrays:
    """What `cut_kernel.cut` takes of a chain, in its order.

    `..._before[k]` is the sum over the blocks before k, `crossing[k]` the bytes that cross the
    place before block k. Values are in the order of their producers. `..._names` number storages,
    those of values first, `n_names` in all. Of the storages that blocks name, those of block k end
    at `..._ends[k]`; `..._befores` is the block that named the same one last, -1 for none, and
    `..._afters` the one that does next, past the chain's end for none.
    """

    action_ms: float
    forward_before: _Floats
    backward_before: _Floats
    weight_before: _Floats
    halving_before: _Floats
    loss_bytes: int
    forward_workspaces: _Ints
    backward_workspaces: _Ints
    input_workspaces: _Ints
    weight_workspaces: _Ints
    arriving_before: _Ints
    written_before: _Ints
    crossing: _Ints
    n_names: int
    saved_ends: _Ints
    saved_befores: _Ints
    saved_sizes: _Ints
    saved_names: _Ints
    static_ends: _Ints
    static_befores: _Ints
    static_sizes: _Ints
    trained_ends: _Ints
    trained_befores: _Ints
    trained_sizes: _Ints
    trained_afters: _Ints
    producers: _Ints
    value_sizes: _Ints
    value_names: _Ints
    gradients: NDArray[np.bool_]
    read_ends: _Ints
    readers: _Ints

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, name) for name in self.__slots__)


def chain_arrays(chain: Chain, training_factor: float) -> ChainArrays:
    """The arrays of `chain`, whose parameters count `1 + training_factor` times."""
    blocks, values = chain.blocks, sorted(chain.values, key=attrgetter("producer"))
    saved = [block.saved for block in blocks]
    names = {value.name: k for k, value in enumerate(values)}
    for name in (*(name for one in saved for name, _ in one), *(v.memory for v in values)):
        names.setdefault(name, len(names))
    trained = [block.trained for block in blocks]
    factor = 1 + training_factor
    static = [
        (*((name, int(np.ceil(size * factor))) for name, size in block.parameters), *block.buffers)
        for block in blocks
    ]
    return ChainArrays(
        action_ms=chain.action_ms,
        forward_before=_before(block.forward_ms for block in blocks),
        backward_before=_before(block.backward_ms for block in blocks),
        weight_before=_before(block.weight_gradient_ms for block in blocks),
        halving_before=_before(block.halving_ms for block in blocks),
        loss_bytes=blocks[-1].loss_bytes,
        forward_workspaces=_each(block.forward_workspace_bytes for block in blocks),
        backward_workspaces=_each(block.backward_workspace_bytes for block in blocks),
        input_workspaces=_each(block.input_workspace_bytes for block in blocks),
        weight_workspaces=_each(block.weight_workspace_bytes for block in blocks),
        arriving_before=_bytes_before(block.arriving_bytes for block in blocks),
        written_before=_bytes_before(block.written_bytes for block in blocks),
        crossing=np.array(crossing(chain)[1], np.int64),
        n_names=len(names),
        saved_ends=_ends(saved),
        saved_befores=_befores(saved),
        saved_sizes=_sizes(saved),
        saved_names=np.array([names[name] for named in saved for name, _ in named], np.int64),
        static_ends=_ends(static),
        static_befores=_befores(static),
        static_sizes=_sizes(static),
        trained_ends=_ends(trained),
        trained_befores=_befores(trained),
        trained_sizes=_sizes(trained),
        trained_afters=_afters(trained),
        producers=np.array([value.producer for value in values], np.int64),
        value_sizes=np.array([value.bytes for value in values], np.int64),
        value_names=np.array([names[value.memory] for value in values], np.int64),
        gradients=np.array([value.gradient for value in values], np.bool_),
        read_ends=_ends([value.consumers for value in values]),
        readers=np.array([k for value in values for k in value.consumers], np.int64),
    )


def links_of(network: Network, n_devices: int) -> tuple[_Floats, ...]:
    """By pair of devices: latencies, bytes per ms, and what sending takes of a device's time."""
    devices = range(n_devices)
    links = [[network.between(d, e) for e in devices] for d in devices]
    return tuple(
        np.array([[getattr(link, fact) for link in row] for row in links])
        for fact in ("latency_ms", "bytes_per_ms", "value_ms", "byte_ms")
    )


_Named = Sequence[tuple[str, int]]


def _before(costs: Iterable[float]) -> _Floats:
    return np.concatenate(([0.0], np.cumsum(list(costs))))


def _bytes_before(sizes: Iterable[int]) -> _Ints:
    return np.concatenate(([0], np.cumsum(list(sizes), dtype=np.int64)))


def _each(sizes: Iterable[int]) -> _Ints:
    return np.array(list(sizes), np.int64)


def _ends(lists: Sequence[Sequence[Any]]) -> _Ints:
    return np.cumsum([len(one) for one in lists], dtype=np.int64)


def _sizes(lists: Sequence[_Named]) -> _Ints:
    return np.array([size for one in lists for _, size in one], np.int64)


def _befores(lists: Sequence[_Named]) -> _Ints:
    last: dict[str, int] = {}
    befores = []
    for k, named in enumerate(lists):
        for name, _ in named:
            befores.append(last.get(name, -1))
            last[name] = k
    return np.array(befores, np.int64)


def _afters(lists: Sequence[_Named]) -> _Ints:
    turned = [named[::-1] for named in reversed(lists)]
    return (len(lists) - 1 - _befores(turned))[::-1]
