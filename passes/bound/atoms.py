"""A chain's atoms: what lies between two neighbouring edges, places where a stage may begin."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir import Chain, Network, Value

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Atoms:
    """Times of each atom on one micro-batch. `back` is what of the backward others wait for.

    `before[k]` is the forward of the first k atoms, `after[k]` the `back` of the last k.
    `messages[k]` is the least that the message behind atom k takes in one micro-batch's forward, if
    a stage ends there; `hops_there[k]` the least that k of them take, `hops_back[k]` k in its
    backward.
    """

    forward: _Floats
    backward: _Floats
    back: _Floats
    saved: _Floats
    before: _Floats
    after: _Floats
    messages: _Floats
    hops_there: _Floats
    hops_back: _Floats


def atoms_of(chain: Chain, edges: tuple[int, ...], network: Network) -> Atoms:
    """The chain's atoms, their times and the messages that none can do without."""
    blocks = chain.blocks
    atom_of = np.searchsorted(edges, np.arange(len(blocks)), side="right") - 1
    # What several blocks save counts at the first; a stage that is sent it holds what is sent.
    sent = {value.name: value.bytes for value in chain.values}
    seen: set[str] = set()
    saved = np.zeros(len(blocks))
    for k, block in enumerate(blocks):
        own = {name: min(n, sent.get(name, n)) for name, n in block.saved if name not in seen}
        seen.update(own)
        saved[k] = sum(own.values())

    def by_atom(costs: list[float] | _Floats) -> _Floats:
        return np.bincount(atom_of, costs, len(edges) - 1).astype(np.float64)

    forward = by_atom([block.forward_ms for block in blocks])
    backward = by_atom([block.backward_ms for block in blocks])
    back = backward - by_atom([block.weight_gradient_ms for block in blocks])
    back[~_always_sends_back(chain, atom_of)] = 0.0
    messages = _message_ms(chain.values, atom_of, network)
    return Atoms(
        forward,
        backward,
        back,
        by_atom(saved),
        np.concatenate(([0.0], np.cumsum(forward))),
        np.concatenate(([0.0], np.cumsum(back[::-1]))),
        messages,
        _least_sums(messages),
        _least_sums(_message_ms([v for v in chain.values if v.gradient], atom_of, network)),
    )


def _message_ms(values: Sequence[Value], atom_of: NDArray[np.int64], network: Network) -> _Floats:
    """By place: the least time of the message there, if the stages there are on two devices.

    What an atom hands to the next is in it, however long the stages are; what goes farther may not.
    """
    handed = np.zeros(atom_of[-1])
    for value in values:
        if value.producer >= 0:
            made = int(atom_of[value.producer])
            if any(k < len(atom_of) and atom_of[k] == made + 1 for k in value.consumers):
                handed[made] += value.bytes
    links = (network.link, *network.pairs.values())
    return np.array([min(one.transfer_ms(n) for one in links) if n else 0.0 for n in handed])


def _least_sums(costs: _Floats) -> _Floats:
    """The least that so many of them add up to, by their number."""
    return np.concatenate(([0.0], np.cumsum(np.sort(costs))))


def _always_sends_back(chain: Chain, atom_of: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether an atom's stage, wherever it begins but at the chain's start, sends gradients back.

    Where no gradient is waited for, all of a stage's backward is its second half.
    """
    n = int(atom_of[-1]) + 1
    # By place of a stage's begin: the first atom from there on that reads a gradient's value.
    reads = np.full(n, n)
    for value in chain.values:
        if value.gradient:
            made = int(atom_of[value.producer]) if value.producer >= 0 else -1
            last = made
            for k in value.consumers:
                reader = int(atom_of[k]) if k < len(atom_of) else n
                reads[last + 1 : reader + 1] = np.minimum(reads[last + 1 : reader + 1], reader)
                last = max(last, reader)
    reads[0] = 0
    found: NDArray[np.bool_] = np.maximum.accumulate(reads) <= np.arange(n)
    return found
