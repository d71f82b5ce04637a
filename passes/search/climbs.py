"""The search: cuts, stages a device, map, order of actions and recomputation, all together.

1. Every named schedule on cuts of equal time is a first answer.
   So are, for each *shape*, a map of stages to devices (round and round, or back and forth, one to
   several stages a device), stages of equal time, each device computing again as little as fits
   (begin.py, fit.py). Of a schedule that is given it is that alone, with its backwards whole too.
2. Others are drawn, of any number of stages, made alike but for the first and the last (forms.py).
   Where memory is short, which is where not all of 1 fits, they have an order made for that
   (rhythm.py), and all that is left goes to 4.
3. From the best of them, cuts are moved as in Pfeife (Jhoo et al., ICML 2025, section 4): one by 1
   to 10 places, the others in proportion, or a few together; of several such moves, the one after
   which the step is likely to be shortest. Ours move the price of memory too, at which a device
   computes blocks again (after a move that does not fit, and now and then, all are made to fit),
   and, where halves of a backward take longer or hold more than a whole one, of how many
   micro-batches it is halved. What a move is worth is told by a step in which each device chooses
   what it runs (rank_kernel.attempt). Where there is time, several climb from each, with chance of
   their own; those that fall behind are dropped.
4. From the best of those, moves go on that keep the order of actions and better it by tabu search
   (refine.py). Where nothing fits yet, most of the work goes to 3.
5. Neighbouring stages of one device, and halves of backwards, are put together where nothing is
   lost by it (tidy.py, order_whole.py).
6. Where memory is short, it is weighed against named schedules, and a schedule that is given
   against its own plans of whole stages computed again (weighed.py).

Climbs go side by side in as many threads as there are workers. What a search does hangs on `seed`
and on the actions that it simulates, for which the time limit and the number of workers stand. The
limit in seconds guards it: a machine that is much slower does less of all of this.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from fxpipe.passes.bound.lower import bytes_free, lower_bound_ms
from fxpipe.passes.search.begin import begun
from fxpipe.passes.search.fit import fitted
from fxpipe.passes.search.forms import Forms
from fxpipe.passes.search.judge import Found, Judge, SearchProblem, shapes
from fxpipe.passes.search.moves import moved
from fxpipe.passes.search.refine import refined, settled
from fxpipe.passes.search.tables import tables
from fxpipe.passes.search.warm import warm
from fxpipe.schedule import Schedule

# Actions simulated in a second by one core of 2024, with what is done besides to choose moves.
_WORK_PER_SECOND = 1_500_000
# A machine so much slower does less of everything, rather than nothing of what comes last.
_SLOW = 1.3
# What comes after the search, of its time.
_FINISH_S = 0.4
_LATE = 30  # moves: a change that is no worse than what stood so long ago is kept
# Shares of the work: for forms, and where memory is short or the order is given; for moves, in
# rounds, each with half of the climbs left, and where nothing fits yet or the order is given. The
# rest is for moves with an order.
_FORMS, _FORMS_SHORT = 0.3, 0.1
_MOVES, _MOVES_ALONE = 0.35, 0.7
# A climb soon comes to where it stays: for each so many actions of work there is another one of
# each shape, up to so many.
_ANOTHER, _MOST_CLIMBS = 8_000_000, 8
_BEGUN = 8  # climbs that go on from there
# Moves of the last order where stages were moved a little, and how often that is done.
_NEAR, _SHARE_NEAR = 30, 0.3
_NAMED = 2  # named schedules whose cuts are moved
# How often the prices of what fits are made to fit again after a move.
_FITTED = 0.2
_BEGIN = 0.2  # of the time, what goes to what is begun with


@dataclass(slots=True)
class _Climb:
    """Where the moves of one shape stand (late acceptance hill climbing, Burke and Bykov,
    EJOR 2017)."""

    here: Found
    best: Found
    late: list[tuple[int, float]]
    random: Random
    moves: int = 0


def _climb_from(found: Found, random: Random) -> _Climb:
    return _Climb(found, found, [found.worth] * _LATE, random)


def _bound_ms(problem: SearchProblem) -> float:
    chain, capacity_bytes = problem.chain, problem.capacity_bytes
    return lower_bound_ms(
        chain,
        problem.edges,
        problem.n_devices,
        problem.n_microbatches,
        problem.network,
        None if problem.recompute else bytes_free(chain, capacity_bytes, problem.training_factor),
    )


class Search:
    """One search under way: its budget, its chance, what it found."""

    def __init__(
        self,
        problem: SearchProblem,
        *,
        seed: int,
        time_limit_s: float,
        n_workers: int = 1,
        progress: Callable[[float], None] = lambda _: None,
        start: Found | None = None,
        bound_ms: float | None = None,
    ) -> None:
        """`start` is what was found of the same chain with more room, `bound_ms` its bound."""
        self.judge = Judge(problem)
        self._start = start
        self.problem = problem
        self.seed = seed
        self.n_workers = n_workers
        self.budget = _WORK_PER_SECOND * max(0.0, time_limit_s - _FINISH_S) * n_workers
        self.n_climbs = min(1 + int(self.budget / _ANOTHER), _MOST_CLIMBS)
        self.time_limit_s = time_limit_s
        self.begun_by = self.ends_at = float("inf")
        self.bound_ms = _bound_ms(problem) if bound_ms is None else bound_ms
        self.best_ms = float("inf")
        self.progress = progress

    def run(self) -> Found:
        """The best step found."""
        with ThreadPoolExecutor(self.n_workers) as pool:
            warm()
            now = time.monotonic()
            self.begun_by, self.ends_at = now + _BEGIN * self.time_limit_s, now + self.time_limit_s
            climbs = self._begun(pool)
            first = min((climb.best for climb in climbs), key=lambda found: found.worth)
            alone = self.problem.table is not None or first.worth[0] > 0
            short = self._is_short(climbs, first)
            for_forms = _FORMS_SHORT if alone or any(first.candidate.prices) else _FORMS
            for_moves = (_MOVES_ALONE if alone else _MOVES) / (1 - for_forms)
            climbs, left = self._formed(pool, climbs, first, for_forms, short)
            if short:
                climbs = climbs[: self.n_climbs]
                list(pool.map(self._settle, climbs))
                climbs = self._in_copies(climbs, self.n_climbs // 2)
                move = partial(self._climb, move=self._refined)
                climbs = self._rounds(pool, climbs, left, move)
            else:
                climbs = self._in_copies(climbs, self.n_climbs)
                move = partial(self._climb, move=self._tried)
                climbs = self._rounds(pool, climbs, for_moves * left, move)
                work = (1 - for_moves) * left / len(climbs)
                list(pool.map(partial(self._refine, work=work), climbs))
        return min((climb.best for climb in climbs), key=lambda found: found.worth)

    def _is_short(self, begun: list[_Climb], first: Found) -> bool:
        """Whether orders have to be made for memory: not all that is begun fits, but `first`.

        Where blocks can be computed again, it is their price that makes things fit; where there is
        little work, devices that choose find more.
        """
        left_open = self.problem.table is None and not self.problem.recompute
        some_fit = first.worth[0] == 0 and any(climb.best.worth[0] > 0 for climb in begun)
        return left_open and some_fit and self._start is None and self.n_climbs > 1

    def _in_copies(self, climbs: list[_Climb], of_each: int) -> list[_Climb]:
        """Several of each, with chance of their own."""
        return climbs + [
            replace(climb, late=[*climb.late], random=Random(f"{self.seed} {k}"))
            for k, climb in enumerate(climbs * (of_each - 1))
        ]

    def _rounds(
        self, pool: Executor, climbs: list[_Climb], work: float, go: Callable[..., None]
    ) -> list[_Climb]:
        """What is left of climbs, of which half `go` on after each round."""
        n_rounds = max(1, len(climbs).bit_length() - 1)
        for _ in range(n_rounds):
            list(pool.map(partial(go, work=work / n_rounds / len(climbs)), climbs))
            climbs = sorted(climbs, key=lambda climb: climb.best.worth)
            climbs = climbs[: max(2, len(climbs) // 2)]
        return climbs

    def _is_enough(self, found: Found) -> bool:
        """Whether the time is over, or nothing better can be found."""
        over, step_ms = found.worth
        best_there_is = not over and step_ms <= self.bound_ms * (1 + 1e-6)
        return best_there_is or time.monotonic() > self.ends_at

    def _begun(self, pool: Executor) -> list[_Climb]:
        """A climb for each shape, and for the best of the named schedules."""
        problem, most = self.problem, len(self.problem.edges) - 1
        if problem.table is not None:
            given = (problem.table, problem.whole)
            return [self._begin(t.stage_to_device, t) for t in given if t is not None]
        named = [
            table
            for table in tables(problem.n_devices, problem.n_microbatches, problem.loops)
            if table.n_stages <= most
        ]
        of_tables = [*pool.map(self._begin, (t.stage_to_device for t in named), named)]
        chosen = [s for s in shapes(problem.n_devices, problem.loops) if len(s) <= most]
        of_shapes = [*pool.map(self._begin, chosen)]
        self.budget -= sum(climb.best.work for climb in (*of_tables, *of_shapes))
        best = sorted(of_tables, key=lambda climb: climb.best.worth)[:_NAMED]
        return [*([] if self._start is None else [self._resumed(self._start)]), *best, *of_shapes]

    def _resumed(self, start: Found) -> _Climb:
        random = Random(self.seed)
        return _climb_from(settled(self.judge, start, random), random)

    def _begin(self, shape: tuple[int, ...], table: Schedule | None = None) -> _Climb:
        found = begun(self.judge, shape, table, self.begun_by)
        return _climb_from(found, Random(f"{self.seed} {shape} {table is None}"))

    def _formed(
        self, pool: Executor, begun: list[_Climb], first: Found, share: float, short: bool
    ) -> tuple[list[_Climb], float]:
        """The best of what is begun, `first` of all, and of the forms of each map of stages.

        These have a `share` of the work. With it comes how much is left to be done.
        """
        price, table = first.candidate.prices[0], first.candidate.table
        drawn = [
            Forms(
                self.judge,
                price,
                Random(f"{self.seed} {k}"),
                short=short,
                table=None if self.problem.table is None else table,
            )
            for k in range(self.n_workers)
        ]
        work, began_at = share * self.budget, time.monotonic()
        late_at = began_at + _SLOW * share * self.time_limit_s

        def is_enough(found: Found) -> bool:
            return self._is_enough(found) or time.monotonic() > late_at

        done = sum(pool.map(lambda forms: forms.draw(work / len(drawn), is_enough), drawn))
        best: dict[tuple[int, ...], Found] = {}
        for device_of, found in (one for forms in drawn for one in forms.best.items()):
            best[device_of] = min(best.get(device_of, found), found, key=lambda one: one.worth)
        of_forms = [_climb_from(one, Random(f"{self.seed} {at}")) for at, one in best.items()]
        climbs = sorted((*begun, *of_forms), key=lambda climb: climb.best.worth)[:_BEGUN]
        self._tell(climbs[0].best)
        now = time.monotonic()
        left, possible = self.budget - work, (self.ends_at - now) * done / (now - began_at)
        return climbs, left if left < _SLOW * possible else max(0.0, possible)

    def _climb(self, climb: _Climb, work: float, move: Callable[[Found, Random], Found]) -> None:
        """Moves, as long as they simulate no more than `work` actions."""
        while work > 0 and not self._is_enough(climb.best):
            found = move(climb.here, climb.random)
            if found.worth[0] or climb.random.random() < _FITTED:
                found = fitted(self.judge, found)
            work -= found.work
            place = climb.moves % _LATE
            if found.worth <= max(climb.late[place], climb.here.worth):
                climb.here = found
                if found.worth < climb.best.worth:
                    climb.best = found
                    self._tell(found)
            climb.late[place] = climb.here.worth
            climb.moves += 1

    def _tried(self, here: Found, random: Random) -> Found:
        candidate = moved(here, self.judge, random)
        alike = candidate.table is None and len(candidate.path) == len(here.candidate.path)
        alike = alike and candidate.halved == here.candidate.halved
        if alike and not here.worth[0] and random.random() < _SHARE_NEAR:
            return self.judge.reordered(candidate, here.order, _NEAR, random.randrange(2**31))
        return self.judge(candidate, (1, self.problem.n_devices), 2)

    def _tell(self, found: Found) -> None:
        over, step_ms = found.worth
        if not over and step_ms < self.best_ms:
            self.best_ms = step_ms
            self.progress(step_ms)

    def _refine(self, climb: _Climb, work: float) -> None:
        """Moves that keep the order, unless the order is given."""
        if self.problem.table is None:
            self._settle(climb)
        self._climb(climb, work, self._refined)

    def _settle(self, climb: _Climb) -> None:
        """From here on, the order is kept."""
        climb.here = settled(self.judge, climb.best, climb.random)
        climb.best = min(climb.best, climb.here, key=lambda found: found.worth)
        climb.late = [climb.here.worth] * _LATE

    def _refined(self, here: Found, random: Random) -> Found:
        if here.worth[0] or self.problem.table is not None:
            return self._tried(here, random)
        return refined(self.judge, here, random)
