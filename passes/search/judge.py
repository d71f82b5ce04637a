"""What the search looks at, candidates, and the judge that tells what one is worth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir import Chain, Network
from fxpipe.passes.partition_costs import crossing
from fxpipe.passes.partition_path import Path
from fxpipe.passes.search import rank_kernel as kernel
from fxpipe.passes.search.alike_kernel import alike_path
from fxpipe.passes.search.chain import chain_arrays, links_of
from fxpipe.passes.search.cut_kernel import cut
from fxpipe.passes.search.shift_kernel import best_shift
from fxpipe.passes.search.shop_kernel import order_of, table_by
from fxpipe.passes.search.tabu_kernel import best_order
from fxpipe.passes.simulate_event_kernel import BACKWARD, FORWARD
from fxpipe.passes.simulate_kernel import NOT_LAUNCHED, run
from fxpipe.passes.simulate_numbers import rows_of
from fxpipe.schedule import Schedule

_PRICES = 64  # steps of the price of memory
# Blocks that save less than such a share of all bytes say nothing of what prices matter.
_TRIFLE = 0.01
# What a move of an action takes, in actions simulated: for itself, and for each stage and
# micro-batch.
_TRY, _TRY_EACH = 15, 0.25
# Where an order needs too much, devices choose by it, each time in less room than they had, and
# leave room for as many of their oldest micro-batches.
_GUARDED = (1, 3, 1 << 30)
# What `run` takes where devices follow a table, and where they choose.
_CHOOSES_NOT = (np.empty((0, 0, 0)), np.empty((0, 0), np.bool_), np.empty(0, np.int64), 0.0, 0)
_NO_ROWS = (np.empty(0, np.int64), np.empty(0, np.int8), *(np.empty(0, np.int32),) * 2)

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """What is searched. A stage begins at one of `edges`.

    `recompute` says whether blocks may be computed again, `loops` how many stages a device may
    hold. With a `table` the order is given, and with it the stages' number and devices; if it is
    in halves, `whole` is the one with whole backwards that may be run in its place.
    """

    chain: Chain
    edges: tuple[int, ...]
    n_devices: int
    n_microbatches: int
    network: Network
    capacity_bytes: tuple[int, ...]
    training_factor: float
    recompute: bool
    loops: tuple[int, ...]
    table: Schedule | None = None
    whole: Schedule | None = None

    @property
    def least_stages(self) -> int:
        """As many stages as each plan has at least."""
        return self.n_devices * min(self.loops) if self.table is None else self.table.n_stages


@dataclass(frozen=True, slots=True)
class Candidate:
    """Places of the stages' bounds among the edges, the stages' devices and price steps.

    The backwards of the last `halved` micro-batches are in two halves. With a `table` the devices
    follow it, else each chooses.
    """

    path: Path
    device_of: tuple[int, ...]
    prices: tuple[int, ...]
    halved: int
    table: Schedule | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate, what it is worth (bytes over, ms), and the step that ran.

    `work` is how many actions were simulated to find it.
    """

    worth: tuple[int, float]
    candidate: Candidate
    numbers: Any
    split: NDArray[np.bool_]
    ran: Any
    work: float

    @property
    def order(self) -> NDArray[np.float64]:
        """Of each F, backward and W by stage and micro-batch, how many actions began before it."""
        return order_of(self.ran, *self.split.shape)  # type: ignore[no-any-return]

    @property
    def at_rest_bytes(self) -> _Ints:
        """What each device holds between steps."""
        return self.numbers[10]  # type: ignore[no-any-return]

    @property
    def peak_bytes(self) -> _Ints:
        """What each device holds at its fullest."""
        return self.ran[7]  # type: ignore[no-any-return]


class Judge:
    """Tells what candidates are worth; several threads may ask."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.chain = chain_arrays(problem.chain, problem.training_factor)
        self.links = links_of(problem.network, problem.n_devices)
        self.capacity = np.array(problem.capacity_bytes, np.int64)
        self.edges = np.array(problem.edges, np.int64)
        self.prices = self._prices()
        # Where halves take longer than a whole, or hold what was computed again from one to the
        # other, it matters how many backwards are halved.
        longer = problem.recompute or any(block.halving_ms > 0 for block in problem.chain.blocks)
        m = problem.n_microbatches
        # Where blocks can be computed again that makes room, else it is kept for the oldest.
        self._guarded = 1 if problem.recompute else m
        self.halvings = tuple(m >> k for k in range(m.bit_length() + 1 if longer else 1))
        chain = self.chain
        costs = chain.forward_before, chain.backward_before, chain.weight_before
        link, n_values = problem.network.link, np.array(crossing(problem.chain)[0])
        message_ms = chain.crossing / link.bytes_per_ms
        message_ms += 2 * (n_values * link.value_ms + chain.crossing * link.byte_ms)  # both ends
        sums = (*costs, chain.halving_before, message_ms)
        self.by_place = tuple(each[self.edges] for each in sums)
        self._rows: dict[int, tuple[Schedule, Any]] = {}

    def _prices(self) -> list[float]:
        """Prices of a byte in ms: none, then from where few blocks are computed again to all."""
        forward = np.diff(self.chain.forward_before)
        sizes = np.array([sum(size for _, size in b.saved) for b in self.problem.chain.blocks])
        ratios = forward[sizes > 0] / sizes[sizes > 0]
        if not self.problem.recompute or not ratios.any():
            return [0.0]
        by_ratio = np.argsort(ratios)
        shares = np.cumsum(sizes[sizes > 0][by_ratio]) / sizes.sum()
        least, most = ratios[by_ratio[np.searchsorted(shares, (_TRIFLE, 1 - _TRIFLE))]]
        least = max(least, ratios[ratios > 0].min())
        return [0.0, *np.geomspace(least / 1.5, 4 * max(least, most), _PRICES).tolist()]

    def numbers(self, candidate: Candidate) -> tuple[Any, Any]:
        """What the kernels take of `candidate`, and the blocks that it computes again."""
        device_of = np.array(candidate.device_of, np.int64)
        prices = np.array([self.prices[step] for step in candidate.prices])
        m, table = self.problem.n_microbatches, candidate.table
        n_halved = len(device_of) * candidate.halved if table is None else len(table.split)
        return cut(  # type: ignore[no-any-return]
            self.edges[list(candidate.path)],
            m,
            device_of,
            prices,
            1 - n_halved / (len(device_of) * m),
            *self.chain,
            *self.links,
        )

    def __call__(self, candidate: Candidate, groups: Sequence[int], rounds: int) -> Found:
        """The best step of `candidate` from these first ranks, with and without patience."""
        policies = [(group, patience) for group in dict.fromkeys(groups) for patience in (0.0, 1.0)]
        return self.by(candidate, policies, rounds)

    def by(self, candidate: Candidate, policies: Sequence[tuple[int, float]], rounds: int) -> Found:
        """The best step of `candidate` by these policies: a group of first ranks, and patience."""
        if candidate.table is not None:
            return self._following(candidate, candidate.table)
        split = self._split(candidate)
        numbers, _ = self.numbers(candidate)
        over, step_ms, work, ran = kernel.attempt(
            numbers,
            split,
            self.capacity,
            np.array([group for group, _ in policies], np.int64),
            np.array([patience for _, patience in policies]),
            self._guarded,
            rounds,
        )
        worth = int(over), float(step_ms)
        return Found(worth, candidate, numbers, split, ran, work)

    def reordered(
        self, candidate: Candidate, order: NDArray[np.float64], tries: int, seed: int
    ) -> Found:
        """`candidate` in the best order that so many moves from `order` come by."""
        numbers, _ = self.numbers(candidate)
        split = self._split(candidate)
        _, order = best_order(numbers, split, order, self.capacity, tries, seed)
        found = self._in_order(order, candidate, numbers, split)
        work, room = (
            len(found.ran[0]) + tries * (_TRY + split.size * _TRY_EACH),
            self.capacity.copy(),
        )
        for guarded in _GUARDED if found.worth[0] else ():
            choice = order, split, room, 0.0, guarded
            chosen = self._ran(_NO_ROWS, choice, candidate, numbers, split)
            work += len(chosen.ran[0])
            if not chosen.worth[0]:
                chosen = self._in_order(chosen.order, candidate, numbers, split)
            found = min(found, chosen, key=lambda one: one.worth)
            room -= np.maximum(chosen.peak_bytes - self.capacity, 0)
        return replace(found, work=work)

    def at_prices(self, found: Found, prices: tuple[int, ...]) -> Found:
        """The stages of `found` at other prices, in its order."""
        candidate = replace(found.candidate, prices=prices)
        if candidate.table is not None:
            return self._following(candidate, candidate.table)
        return self._in_order(found.order, candidate, self.numbers(candidate)[0], found.split)

    def carried_ms(self, candidate: Candidate, order: NDArray[np.float64]) -> float:
        """How long the step of `candidate` is in this order, whatever the memory."""
        numbers, _ = self.numbers(candidate)
        return float(best_order(numbers, self._split(candidate), order, self.capacity, 0, 0)[0])

    def _in_order(
        self,
        order: NDArray[np.float64],
        candidate: Candidate,
        numbers: Any,
        split: NDArray[np.bool_],
    ) -> Found:
        """The step of the table that this order makes."""
        rows = table_by(order, split, numbers[0], len(self.capacity))
        return self._ran(rows, _CHOOSES_NOT, candidate, numbers, split)

    def _ran(
        self, rows: Any, choice: Any, candidate: Candidate, numbers: Any, split: NDArray[np.bool_]
    ) -> Found:
        """The step of a table, or of devices that choose."""
        ran = run(*rows, *choice, *numbers, False, NOT_LAUNCHED)
        over, step_ms = kernel.judge(ran, 2 * split.size + split.sum(), self.capacity)
        worth = int(over), float(step_ms)
        return Found(worth, candidate, numbers, split, ran, len(ran[0]))

    def _split(self, candidate: Candidate) -> NDArray[np.bool_]:
        """By stage and micro-batch, whether the backward is in halves."""
        m = self.problem.n_microbatches
        split = np.zeros((len(candidate.device_of), m), np.bool_)
        split[:, m - candidate.halved :] = True
        return split

    def alike(self, shares: NDArray[np.float64], price: float) -> Path:
        """Bounds of stages as alike as may be, but for their `shares`.

        They are where messages are short, at this `price`.
        """
        forward, backward, *_, message = self.by_place
        return tuple(alike_path(forward, backward, message, shares, price).tolist())

    def leisure(self, found: Found) -> NDArray[np.float64]:
        """Of each stage, the work of a mean device over that of its own, from a half to twice."""
        lasts, device_of = found.numbers[1], list(found.candidate.device_of)
        work_ms = np.bincount(device_of, lasts[FORWARD, :, 0] + lasts[BACKWARD, :, 0])
        leisure: NDArray[np.float64] = np.clip(work_ms.mean() / np.maximum(work_ms, 1e-9), 0.5, 2.0)
        return leisure[device_of]

    def shifted(self, found: Found, n_drawn: int, seed: int) -> Path:
        """The bounds of `found` moved as, of so many moves, does its step the most good."""
        candidate = found.candidate
        path, device_of = np.array(candidate.path), np.array(candidate.device_of)
        best = best_shift(path, n_drawn, seed, found.ran, device_of, self.by_place)
        return tuple(best.tolist())

    def _following(self, candidate: Candidate, table: Schedule) -> Found:
        split = np.zeros((len(candidate.device_of), table.n_microbatches), np.bool_)
        for stage, i in table.split:
            split[stage, i] = True
        numbers, _ = self.numbers(candidate)
        # By identity: to hash a table takes as long as to simulate it. It is kept, so that no other
        # takes its place.
        if id(table) not in self._rows:
            self._rows[id(table)] = (table, rows_of(table))
        return self._ran(self._rows[id(table)][1], _CHOOSES_NOT, candidate, numbers, split)


def shapes(n_devices: int, loops: Sequence[int]) -> list[tuple[int, ...]]:
    """Maps of stages to devices: round and round, and back and forth."""
    found: dict[tuple[int, ...], None] = {}
    for count in loops:
        forth = list(range(n_devices))
        found[tuple(forth * count)] = None
        found[tuple(d for k in range(count) for d in (forth if k % 2 == 0 else forth[::-1]))] = None
    return list(found)
