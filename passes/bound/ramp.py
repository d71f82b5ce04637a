"""How long devices must wait before the first gradient comes back to them, however stages are cut.

The more stages there are, the smaller they can be, and the sooner each device has some work; but
each adds a message to the way of every micro-batch. Let K runs of blocks lie on one device each,
neighbours on two, run k from b[k-1] to b[k] in ms of the chain's forward, and let a[k] = b[k-1] +
the least that k - 1 messages take be when it can begin. At a run k, of the devices that work

1. each can begin its next run among k ... K no sooner than that run; no two have the same one;
2. or it has none, then it waits for the gradient of its last run before k;
3. until then it can do no more than m times the forward of its runs before k; those of all devices
   together last m * b[k-1];
4. when the first micro-batch has come to the end, the others follow it back (flow.py).

So the devices' waiting, all together, is at least the sum of these times less m * b[k-1], at each
of the runs. A linear program finds the b that make the largest of these smallest; the least over
all K holds for every plan.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from fxpipe.passes.bound.atoms import Atoms
from fxpipe.passes.bound.flow import turn_ms

# Numbers of runs are taken together that differ by less than this share.
_TOGETHER = 8
# Beyond so many runs a device, only messages count.
_MOST_LOOPS = 16


def ramp_ms(atoms: Atoms, n_devices: int, n_microbatches: int) -> float:
    """The least that so many devices wait before their backwards, all together, in ms.

    Says little where there are more micro-batches than devices.
    """
    p, m, least_ms, most = n_devices, n_microbatches, float("inf"), 0
    after_turn_ms = turn_ms(atoms, p, m)

    def behind_all_forwards(n_runs: int) -> float:
        forward_ms = float(atoms.before[-1])
        begin_ms = forward_ms + float(atoms.hops_there[n_runs - 1])
        return p * begin_ms - m * forward_ms + after_turn_ms

    for fewest, most in _numbers_of_runs(p, min(len(atoms.forward), _MOST_LOOPS * p)):
        turned_ms = behind_all_forwards(fewest)
        if turned_ms >= least_ms:
            return least_ms
        least_ms = min(least_ms, max(turned_ms, _waiting_ms(atoms, p, m, fewest, most)))
    if most < len(atoms.forward):
        least_ms = min(least_ms, behind_all_forwards(most + 1))
    return least_ms


def _numbers_of_runs(fewest: int, end: int) -> Iterator[tuple[int, int]]:
    while fewest <= end:
        most = min(end, fewest + fewest // _TOGETHER // 2)
        yield fewest, most
        fewest = most + 1


def _waiting_ms(atoms: Atoms, p: int, m: int, fewest: int, most: int) -> float:
    """The program's answer for `fewest` to `most` runs.

    Those that are lacking count as empty ones before the first, and bring no message.
    """
    from ortools.linear_solver import pywraplp

    forward_ms = float(atoms.before[-1])
    there = [float(atoms.hops_there[max(0, k - (most - fewest))]) for k in range(most)]
    rates = _back_rates(atoms)
    solver: Any = pywraplp.Solver.CreateSolver("GLOP")
    bounds = [solver.NumVar(0.0, forward_ms, "") for _ in range(most + 1)]
    # A run has an atom at least.
    for k in range(most + 1):
        bounds[k].SetLb(float(atoms.before[max(0, k - (most - fewest))]))
        bounds[k].SetUb(float(atoms.before[len(atoms.forward) - (most - k)]) if k else 0.0)
    bounds[-1].SetLb(forward_ms)
    # What is behind a bound sends its gradients on.
    backs = [solver.NumVar(0.0, solver.infinity(), "") for _ in bounds]
    for bound, back in zip(bounds, backs, strict=True):
        for rate, least_ms in rates:
            solver.Add(back >= rate * (forward_ms - bound) + least_ms)
    waiting = solver.NumVar(0.0, solver.infinity(), "")
    for k in range(most + 1):
        if k < most:
            solver.Add(bounds[k] <= bounds[k + 1])
        begin = [bounds[j] + there[j] for j in range(k, min(most, k + p))]
        # The last run before k is back first, as far as the runs behind it send gradients on.
        for before in range(k, k - (p - len(begin)), -1):
            back_ms = float(atoms.hops_back[most - before])
            begin.append(forward_ms + there[-1] + backs[before] + back_ms)
        solver.Add(solver.Sum(begin) - m * bounds[k] <= waiting)
    solver.Minimize(waiting)
    if solver.Solve() != solver.OPTIMAL:
        return 0.0
    return float(waiting.solution_value()) * (1 - 1e-6)


def _back_rates(atoms: Atoms) -> list[tuple[float, float]]:
    """Lines, as rate and ms, under the gradients' way through all that is behind any place.

    Each is of the lower hull of that over the forward of what is behind the place.
    """
    behind = zip(
        (atoms.before[-1] - atoms.before[::-1]).tolist(), atoms.after.tolist(), strict=True
    )
    hull: list[tuple[float, float]] = []
    for x, y in behind:
        if hull and x <= hull[-1][0]:
            continue  # takes no time forward
        while len(hull) > 1 and _rate(hull[-2], hull[-1]) >= _rate(hull[-2], (x, y)):
            hull.pop()
        hull.append((x, y))
    return [(rate := _rate(a, b), a[1] - rate * a[0]) for a, b in pairwise(hull)]


def _rate(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
