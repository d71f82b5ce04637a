"""A lower bound on the step of every plan: any cuts, map, order and loops.

Whatever the plan, for each number of devices that work:

1. All work has to be done: m micro-batches of the chain's forward and backward.
2. The k-th device to be reached can't begin before the forward of k atoms and k messages.
3. Until the first micro-batch has come to the chain's end and back to a device, that device can do
   forwards only: those of all devices together last no longer than m times the chain's, nor than
   those whose saved bytes fit at once.
4. Small stages let devices begin soon, and micro-batches follow one another soon, but cost messages
   (ramp.py, pace.py).
5. Micro-batches follow one another through each atom (flow.py).
6. The device of an atom does each of its actions m times, after what has to come before the first
   of them and before what has to come after the last.
7. All of an atom's work is one device's: long ones do not go into devices' time without a rest.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir import Chain, Network
from fxpipe.passes.bound.atoms import Atoms, atoms_of
from fxpipe.passes.bound.flow import following_ms
from fxpipe.passes.bound.pace import pace_ms
from fxpipe.passes.bound.ramp import ramp_ms

_Floats = NDArray[np.float64]


def lower_bound_ms(
    chain: Chain,
    edges: tuple[int, ...],
    n_devices: int,
    n_microbatches: int,
    network: Network,
    free_bytes: int | None = None,
) -> float:
    """Milliseconds that no step of this chain on these devices can be shorter than.

    A stage begins at one of `edges`. `free_bytes` is what all devices together have for what
    micro-batches save (`bytes_free`), None where blocks may be computed again. Source of 3: the
    idle time of the zero-bubble schedules (Qi et al., ICLR 2024, section 2.3), here for stages of
    any size.
    """
    atoms = atoms_of(chain, edges, network)
    m, before, after = n_microbatches, atoms.before, atoms.after
    forward_ms, back_ms = before[-1], after[-1]
    work_ms = m * float((atoms.forward + atoms.backward).sum())
    first_ms = m * forward_ms
    if free_bytes is not None:
        first_ms = most_forward_ms(atoms, m, free_bytes)
    bounds = []
    # A plan may leave devices without a stage: the bound is that of the best number of them.
    for used in range(1, min(n_devices, len(atoms.forward)) + 1):
        there, back = atoms.hops_there[:used], atoms.hops_back[:used]
        end_ms = float(forward_ms + there[-1])
        begins = float((before[:used] + there).sum())
        returns = float((end_ms + after[:used] + back).sum())
        idle_ms = max(begins, returns - m * forward_ms, used * end_ms - first_ms)
        there_and_back_ms = end_ms + back_ms + float(back[-1])
        longest_ms = longest_atom_ms(atoms, m, float(there[-1]), float(back[-1]))
        bounds.append(max((work_ms + idle_ms) / used, there_and_back_ms, longest_ms))
    # These take longer to find: only of the number of devices that the bound hangs on.
    for _ in bounds:
        used = 1 + int(np.argmin(bounds))
        idle_ms = following_ms(atoms, used, m)
        if 1 < used >= m:
            idle_ms = max(idle_ms, ramp_ms(atoms, used, m), pace_ms(atoms, used, m))
        begins_ms = before[:used] + atoms.hops_there[:used]
        longer_ms = max((work_ms + idle_ms) / used, packed_ms(atoms, m, begins_ms))
        if longer_ms <= bounds[used - 1]:
            break
        bounds[used - 1] = longer_ms
    return float(min(bounds)) * (1 - 1e-9)


def bytes_free(chain: Chain, capacity_bytes: Sequence[int], training_factor: float) -> int:
    """What devices of this capacity have together besides the model, its gradients and states.

    Nothing where these alone are too large.
    """
    parameters = dict(one for block in chain.blocks for one in block.parameters)
    buffers = dict(one for block in chain.blocks for one in block.buffers)
    static = (1 + training_factor) * sum(parameters.values()) + sum(buffers.values())
    return max(0, sum(capacity_bytes) - int(static))


def most_forward_ms(atoms: Atoms, n_microbatches: int, free_bytes: int) -> float:
    """How long forwards last at most before any backward, their saved bytes in `free_bytes`.

    Each micro-batch has come to some place of the chain. Of all places for all of them, the best is
    on the upper hull of forward over bytes: each micro-batch gets as much room.
    """
    share, saved = free_bytes / n_microbatches, np.cumsum(atoms.saved)
    inside = np.concatenate(([True], saved <= share))
    ms, n_bytes = atoms.before, np.concatenate(([0.0], saved))
    best_ms = float(ms[inside].max())
    for k in np.flatnonzero(~inside):
        rise = (share - n_bytes[inside]) / (n_bytes[k] - n_bytes[inside])
        best_ms = max(best_ms, float((ms[inside] + rise * (ms[k] - ms[inside])).max()))
    return n_microbatches * best_ms


def packed_ms(atoms: Atoms, n_microbatches: int, begins: _Floats) -> float:
    """The step in which devices that begin then have room for all atoms, each on one of them.

    As many whole units as atoms have each by itself, or more, devices have (a dual feasible
    function of bin packing; Fekete and Schepers, Math. Programming 2001). Each atom's time is one.
    """
    loads = n_microbatches * (atoms.forward + atoms.backward)
    n_devices = np.arange(1, len(begins) + 1)
    step_ms = 0.0
    for unit in np.unique(loads[loads > 0]) * (1 - 1e-9):
        n_units = int((loads // unit).sum())
        # Those of the first devices would have room by then, but for what is left of each.
        ms = float(np.min((n_units * unit + np.cumsum(begins)) / n_devices))
        whole = np.maximum((ms - begins) // unit, 0)
        missing = n_units - int(whole.sum())
        if missing > 0:
            ms = float(np.sort(begins + (whole + 1) * unit)[missing - 1])
        step_ms = max(step_ms, ms)
    return step_ms


def longest_atom_ms(atoms: Atoms, n_microbatches: int, there_ms: float, back_ms: float) -> float:
    """The step of the atom whose device has the most to do between what is before and after.

    A micro-batch's messages take `there_ms` in the forward and `back_ms` in the backward at least.
    """
    m, forward, backward, back = n_microbatches, atoms.forward, atoms.backward, atoms.back
    reached = atoms.before[:-1]
    # When the first micro-batch is back at the atom; what its forward has behind it, all told.
    returned = atoms.before[-1] + there_ms + atoms.after[:-1][::-1]
    goes_on = atoms.before[-1] + there_ms - atoms.before[1:] + atoms.after[-1] + back_ms
    sent_on = atoms.after[-1] - atoms.after[1:][::-1]
    spans = (
        reached + m * (forward + backward),
        reached + m * (forward + back) + sent_on,
        reached + m * forward + goes_on,
        returned + m * backward,
        returned + m * back + sent_on + back_ms,
    )
    return float(np.max(spans))
