"""How long devices must wait because micro-batches follow one another through each atom.

All actions of an atom are one device's, so one after another. Of i + 1 micro-batches that have come
through some place, the last has waited i times for the longest atom before it, besides what each
has before it: a flow shop's bound, which no order of micro-batches escapes. So there is a most that
devices can have done by any time, all together, and what they could do more they wait.
"""

import numpy as np
from numpy.typing import NDArray

from fxpipe.passes.bound.atoms import Atoms

_Floats = NDArray[np.float64]

# A bound holds at any time; at so many of them it is about as high as at all.
_TIMES = 512


def following_ms(atoms: Atoms, n_devices: int, n_microbatches: int) -> float:
    """The least that so many devices wait in all, in ms, until the busiest time of the turn."""
    end_ms = float(atoms.before[-1] + atoms.hops_there[n_devices - 1])
    there = np.linspace(0.0, end_ms, _TIMES)
    back = turn_times(atoms)
    most_there = forwards_by(atoms, n_microbatches, there)
    most_back = forwards_by(atoms, n_microbatches, end_ms + back)
    most_back += backwards_by(atoms, n_microbatches, back)
    waits = (n_devices * there - most_there, n_devices * (end_ms + back) - most_back)
    return float(np.max(waits))


def turn_ms(atoms: Atoms, n_devices: int, n_microbatches: int) -> float:
    """What devices wait at least from the first micro-batch's end on, all forwards being done."""
    times = turn_times(atoms)
    return float(np.max(n_devices * times - backwards_by(atoms, n_microbatches, times)))


def turn_times(atoms: Atoms) -> _Floats:
    """Times to look at, after the first micro-batch has come to the chain's end."""
    return np.linspace(0.0, atoms.after[-1], _TIMES)


def forwards_by(atoms: Atoms, n_microbatches: int, times: _Floats) -> _Floats:
    """How many ms of forwards all devices together have done by each of the times, at most."""
    waits = np.maximum.accumulate(atoms.forward)
    return _done_by(times, atoms.before[:-1], waits, atoms.forward, n_microbatches)


def backwards_by(atoms: Atoms, n_microbatches: int, times: _Floats) -> _Floats:
    """The same of backwards, by times after the first micro-batch has come to the chain's end.

    The next turns there when the last atom has done a forward and a backward more.
    """
    turn = max(atoms.forward.max(), atoms.forward[-1] + atoms.back[-1])
    waits = np.maximum(turn, np.maximum.accumulate(atoms.back[::-1]))
    return _done_by(times, atoms.after[:-1], waits, atoms.backward[::-1], n_microbatches)


def _done_by(
    times: _Floats, begins: _Floats, waits: _Floats, costs: _Floats, n_microbatches: int
) -> _Floats:
    """Of `n_microbatches` that each begin an atom one of its `waits` after the one before."""
    before = np.concatenate(([0.0], np.cumsum(costs)))
    done = np.zeros(len(times))
    for i in range(n_microbatches):
        starts = begins + i * waits
        if starts[0] >= times[-1]:
            break
        k = np.searchsorted(starts, times, side="right") - 1
        done += np.where(k < 0, 0.0, before[k] + np.minimum(costs[k], times - starts[k]))
    return done
