"""Partition by dynamic programming: fast, for chains.

1. A schedule's step is about everything once, plus the wait for the slowest stage: (m - 1) (F + B),
   or, where stage j sends w forwards ahead, (m - 1) B + (m - w) F, as those fill the time in which
   the first backward is on its way. Both are tried.
2. For a limit on that wait, the cuts with the least communication follow from a recursion over
   (stages, atoms): a sliding-window minimum, as what fits (limit and memory) is a window of starts
   that moves on with the end. The limit runs from the least possible upwards.
3. The best few go to the simulator, and their cuts are moved on for as long as the simulator says
   that it gets better: this is where skips, links and the order of the stages, which the recursion
   can't see, come in.
"""

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir import Block
from fxpipe.passes.partition import Problem, Scorer, Solution
from fxpipe.passes.partition_costs import Cuts, held_sets, parameter_bytes
from fxpipe.passes.partition_window_kernel import least_communication
from fxpipe.schedule import Kind

# Limits tried: this many at most, each longer than the one before by this factor.
_LIMITS, _GROWTH = 64, 1.004
# How many cuts of each kind of wait are simulated, and how many of these are moved on.
_SIMULATED, _STARTS = 8, 4
# Simulations while cuts are moved on: about half a second for 1000 blocks on 16 devices.
_BUDGET = 160
_MOVES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class _Line:
    """The chain by edge: the wait up to it, by stage, and what a cut there costs."""

    wait_ms: NDArray[np.float64]
    crossing_ms: NDArray[np.float64]

    def slowest(self, path: tuple[int, ...]) -> float:
        """The longest wait of a stage."""
        stages, ends = np.arange(len(path) - 1), np.array(path)
        return float((self.wait_ms[stages, ends[1:]] - self.wait_ms[stages, ends[:-1]]).max())

    def trip(self, path: tuple[int, ...]) -> float:
        """What all cuts cost."""
        return float(sum(self.crossing_ms[list(path[1:-1])]))


def solve(score: Scorer) -> Solution:
    """The best cuts found; they exceed the capacity only if nothing found fits."""
    problem = score.problem
    # Stages of one device share it, evenly or not.
    candidates = {
        cuts: None
        for share in sorted({1, problem.loops})
        for cuts in _candidates(problem, [of // share for of in problem.capacity_bytes])
    }
    capacity, least = [*problem.capacity_bytes], _fair_share(problem)
    while not candidates:
        # Nothing fits by this estimate: the least that would is the best start for the simulator.
        capacity = [max(of + of // 8 + 1, least) for of in capacity]
        candidates = dict.fromkeys(_candidates(problem, capacity))
    starts = sorted(candidates, key=score)[:_STARTS]
    last = len(score.judged) + _BUDGET
    return Solution(min((_descend(score, cuts, last) for cuts in starts), key=score))


def _fair_share(problem: Problem) -> int:
    """What a stage must hold at least: its part of parameters and what training keeps of them."""
    parameters = parameter_bytes(problem.chain, 0, len(problem.chain.blocks))
    return int((1 + problem.training_factor) * parameters) // problem.n_stages


def _candidates(problem: Problem, capacity_bytes: list[int]) -> list[Cuts]:
    """Promising cuts, best rank first; none if no cuts are likely to fit."""
    received, crossing_ms = _crossings(problem)
    devices = problem.schedule.stage_to_device
    held = held_sets(problem.schedule, problem.recompute)
    rooms = [(pairs, capacity_bytes[d]) for pairs, d in zip(held, devices, strict=True)]
    starts = {room: _first_starts(problem, received, *room) for room in dict.fromkeys(rooms)}
    first_start = np.array([starts[room] for room in rooms])
    m = problem.schedule.n_microbatches
    found: dict[Cuts, None] = {}
    for ahead in dict.fromkeys(((1,) * problem.n_stages, _forwards_ahead(problem))):
        line = _Line(_waits(problem, [m - w for w in ahead]), crossing_ms)
        for path in _sweep(line, first_start)[:_SIMULATED]:
            found[tuple(problem.edges[e] for e in path[1:-1])] = None
    return list(found)


def _forwards_ahead(problem: Problem) -> tuple[int, ...]:
    """By stage: the forwards before its first backward; 1 where that is the same for all."""
    ahead = [0] * problem.n_stages
    for row in problem.schedule.rows:
        begun: set[int] = set()
        for action in row:
            if action.kind is not Kind.FORWARD:
                begun.add(action.stage)
            elif action.stage not in begun:
                ahead[action.stage] += 1
    return tuple(ahead) if len(set(ahead)) > 1 else (1,) * problem.n_stages


def _waits(problem: Problem, forwards: list[int]) -> NDArray[np.float64]:
    """By stage, by edge: `forwards` forwards and m - 1 backwards of all atoms before it."""
    later = problem.schedule.n_microbatches - 1
    blocks, edges = problem.chain.blocks, list(problem.edges)
    forward = np.array([0.0, *accumulate(block.forward_ms for block in blocks)])[edges]
    backward = np.array([0.0, *accumulate(block.backward_ms for block in blocks)])[edges]
    again = [min(later, sum(recomputed)) for recomputed in problem.recompute]
    waits: NDArray[np.float64] = np.outer(np.add(forwards, again), forward) + later * backward
    return waits


def _crossings(problem: Problem) -> tuple[list[int], NDArray[np.float64]]:
    """By edge: the bytes that cross a cut there, and what it costs in ms.

    That is their round trip, and a device's share of what sending takes from the work of all.
    """
    chain, edges, link = problem.chain, problem.edges, problem.network.link
    forward, backward = [0] * len(edges), [0] * len(edges)
    busy_ms = [0.0] * len(edges)
    for value in chain.values:
        readers = [k for k in value.consumers if k < len(chain.blocks)]
        if value.producer < 0 or not readers:
            continue
        first = bisect_left(edges, value.producer + 1)
        for e in range(first, bisect_left(edges, max(readers) + 1)):
            forward[e] += value.bytes
            backward[e] += value.bytes if value.gradient else 0
            busy_ms[e] += link.busy_ms(1, value.bytes) * (2 if value.gradient else 1)
    ends = 2 * problem.schedule.n_microbatches / problem.n_devices
    costs = np.array(
        [
            sum(link.transfer_ms(size) for size in sizes if size) + ends * busy
            for *sizes, busy in zip(forward, backward, busy_ms, strict=True)
        ]
    )
    return forward, costs


def _sweep(line: _Line, first_start: NDArray[np.int64]) -> list[tuple[int, ...]]:
    """Edges of the stages for rising limits, best rank first; none if nothing fits."""
    loosest = _least_communication(line, first_start, inf)
    if loosest is None:
        return []
    low, high = 0.0, line.slowest(loosest)
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        found = _least_communication(line, first_start, middle)
        if found is None:
            low = middle
        else:
            high = line.slowest(found)
    rank = {loosest: line.slowest(loosest) + line.trip(loosest)}
    limit = high
    for _ in range(_LIMITS):
        found = _least_communication(line, first_start, limit * (1 + 1e-9))
        if found is not None:
            rank[found] = line.slowest(found) + line.trip(found)
        limit *= _GROWTH
        if limit + line.trip(loosest) > min(rank.values()) * _GROWTH:
            break
    return sorted(rank, key=lambda path: (rank[path], path))


def _least_communication(
    line: _Line, first_start: NDArray[np.int64], limit_ms: float
) -> tuple[int, ...] | None:
    """Edges of the stages, first and last included, no stage's wait over `limit_ms`."""
    path = least_communication(line.wait_ms, line.crossing_ms, first_start, limit_ms)
    return tuple(path.tolist()) or None


def _first_starts(
    problem: Problem, received: list[int], pairs: tuple[tuple[int, int], ...], capacity_bytes: int
) -> list[int]:
    """For each edge as a stage's end: the first start from which the stage fits its device.

    A guess on the safe side of what `held_sets` knows: one more message than micro-batches in
    flight may wait at the door.
    """
    edges, blocks = problem.edges, problem.chain.blocks
    atoms = [blocks[begin:end] for begin, end in pairwise(edges)]
    workspaces = [max(map(_workspace_bytes, atom)) for atom in atoms]
    uses = Counter[tuple[str, str]]()
    held = {"saved": 0, "parameters": 0, "buffers": 0}
    starts = [0] * len(edges)
    start = 0
    largest: deque[int] = deque()  # of the stage's atoms, those whose workspace none behind reaches

    def move(atom: int, step: int) -> None:
        for block in atoms[atom]:
            for kind in held:
                for name, size in getattr(block, kind):
                    uses[kind, name] += step
                    if uses[kind, name] == (1 if step > 0 else 0):
                        held[kind] += step * size

    for end in range(1, len(edges)):
        move(end - 1, 1)
        while largest and workspaces[largest[-1]] <= workspaces[end - 1]:
            largest.pop()
        largest.append(end - 1)
        while start < end:
            need = (1 + problem.training_factor) * held["parameters"] + held["buffers"]
            need += workspaces[largest[0]]
            need += max(
                saved * held["saved"] + (in_flight + 1) * received[start]
                for saved, in_flight in pairs
            )
            if need <= capacity_bytes:
                break
            move(start, -1)
            start += 1
            if largest[0] < start:
                largest.popleft()
        starts[end] = start
    return starts


def _workspace_bytes(block: Block) -> int:
    """The most that it needs while it runs, forward or backward."""
    return max(block.forward_workspace_bytes, block.loss_bytes, block.backward_workspace_bytes)


def _descend(score: Scorer, cuts: Cuts, last: int) -> Cuts:
    """Move cuts for as long as the simulator likes it and fewer than `last` are simulated.

    One cut by some places first, then neighbouring cuts together by one.
    """
    edges = score.problem.edges
    path = [0, *(edges.index(cut) for cut in cuts), len(edges) - 1]
    best = score(cuts)
    inner = range(1, len(path) - 1)
    moves = [(j, j + 1, sign * size) for j in inner for size in _MOVES for sign in (1, -1)]
    moves += [(j, k + 1, sign) for j in inner for k in inner if j < k for sign in (1, -1)]
    improved = True
    while improved:
        improved = False
        for begin, end, step in moves:
            moved = [e + step if begin <= j < end else e for j, e in enumerate(path)]
            if not (moved[begin - 1] < moved[begin] and moved[end - 1] < moved[end]):
                continue
            if len(score.judged) >= last:
                return best[2]
            found = score(tuple(edges[e] for e in moved[1:-1]))
            if found < best:
                best, path, improved = found, moved, True
    return best[2]
