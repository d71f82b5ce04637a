"""The search: cuts, stages a device, map, order of actions and recomputation, all together.

1. Every named schedule on cuts of equal time is a first answer.
2. For each *shape*, a map of stages to devices (round and round, or back and forth, one to several
   stages a device), cuts are moved as in Pfeife (Jhoo et al., ICML 2025, section 4): one by 1 to 10
   places, the others in proportion, or a few together; ours move the price of memory too, at
   which a device computes blocks again. What a move is worth is told by a step in which each
   device chooses what it runs (search_kernel.attempt). Shapes that fall behind are dropped.
3. The order of the best is polished, and halves of backwards that gain nothing are put together.

What it does hangs on `seed` and on the actions that it simulates, which the time limit stands for;
the limit in seconds only guards it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from fxpipe.passes import order
from fxpipe.passes.search_bound import lower_bound_ms
from fxpipe.passes.search_judge import (
    Candidate,
    Found,
    Judge,
    Path,
    SearchProblem,
    even_path,
    shapes,
    spread,
)
from fxpipe.passes.simulate import KINDS
from fxpipe.schedule import Action, Schedule

# Actions simulated in a second by one core of 2024.
_WORK_PER_SECOND = 2_500_000
_FARTHEST = 10
_LATE = 30  # moves: a change that is no worse than what stood so long ago is kept
# Shares of the work: for moves in rounds, each with half of the shapes left, then for the order.
_ROUNDS, _POLISH = (0.25, 0.25, 0.25), 0.25
_PIECES = 8  # in which the order is polished: between them the time is looked at
_NEAR, _SHARE_NEAR = 3, 0.3
_NAMED = 2  # named schedules whose cuts are moved


@dataclass(slots=True)
class _Climb:
    """Where the moves of one shape stand (late acceptance hill climbing, as in `polish`)."""

    here: Found
    best: Found
    late: list[tuple[int, float]]
    moves: int = 0


class Search:
    """One search under way: its budget, its chance, what it found."""

    def __init__(
        self,
        problem: SearchProblem,
        *,
        seed: int,
        time_limit_s: float,
        progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.judge = Judge(problem)
        self.problem = problem
        self.random = Random(seed)
        self.budget = _WORK_PER_SECOND * time_limit_s
        self.time_limit_s = time_limit_s
        self.ends_at = float("inf")
        self.bound_ms = lower_bound_ms(
            problem.chain, problem.edges, problem.n_devices, problem.n_microbatches, problem.network
        )
        self.progress = progress

    def run(self) -> Found:
        """The best step found."""
        climbs = self._begun()  # the first step of a process waits for machine code
        self.ends_at = time.monotonic() + self.time_limit_s
        spent = 0.0
        for share in _ROUNDS:
            spent += share
            for k, climb in enumerate(climbs):
                begun = self.judge.work
                until = begun + (spent * self.budget - begun) / (len(climbs) - k)
                while self.judge.work < until and not self._is_over(climb):
                    self._move(climb)
            climbs.sort(key=lambda climb: climb.best.worth)
            climbs = climbs[: max(2, len(climbs) // 2)]
        return min(
            (self._polished(climb, len(climbs)) for climb in climbs),
            key=lambda found: found.worth,
        )

    def _is_over(self, climb: _Climb) -> bool:
        """Whether the time is, or nothing better can be found."""
        over, step_ms = climb.best.worth
        best_there_is = not over and step_ms <= self.bound_ms * (1 + 1e-6)
        return best_there_is or time.monotonic() > self.ends_at

    def _begun(self) -> list[_Climb]:
        """A climb for each shape, and for the best of the named schedules."""
        problem, most = self.problem, len(self.problem.edges) - 1
        if problem.table is not None:
            return [self._begin(problem.table.stage_to_device, problem.table)]
        named = sorted(
            (
                self._begin(table.stage_to_device, table)
                for table in tables(problem.n_devices, problem.n_microbatches, problem.loops)
                if table.n_stages <= most
            ),
            key=lambda climb: climb.best.worth,
        )
        chosen = [s for s in shapes(problem.n_devices, problem.loops) if len(s) <= most]
        return [*named[:_NAMED], *(self._begin(shape) for shape in chosen)]

    def _begin(self, shape: tuple[int, ...], table: Schedule | None = None) -> _Climb:
        """Equal times, and the lowest price of memory at which that fits."""
        p, m = self.problem.n_devices, self.problem.n_microbatches
        path = even_path(self.problem, len(shape))
        found = None
        for step in range(len(self.judge.prices)):
            tried = self.judge(Candidate(path, shape, (step,) * len(shape), table), (1, p, m), 3)
            if found is None or tried.worth < found.worth:
                found = tried
            if not tried.worth[0]:
                break
        assert found is not None
        return _Climb(found, found, [found.worth] * _LATE)

    def _move(self, climb: _Climb) -> None:
        here = climb.here
        candidate = self._moved(here.candidate)
        alike = candidate.table is None and len(candidate.path) == len(here.candidate.path)
        if alike and self.random.random() < _SHARE_NEAR:
            found = self.judge.near(candidate, here, _NEAR, self.random.randrange(2**31))
        else:
            found = self.judge(candidate, (1, self.problem.n_devices), 2)
        place = climb.moves % _LATE
        if found.worth <= max(climb.late[place], climb.here.worth):
            climb.here = found
            if found.worth < climb.best.worth:
                climb.best = found
                self.progress(found.worth[1])
        climb.late[place] = climb.here.worth
        climb.moves += 1

    def _moved(self, candidate: Candidate) -> Candidate:
        """One random move; the candidate itself where there is nothing to move."""
        kind = self.random.random()
        if len(self.judge.prices) > 1 and kind < 0.2:
            return replace(candidate, prices=self._priced(candidate.prices))
        if len(candidate.path) == 2:
            return candidate
        if candidate.table is None and kind > 0.7:
            return self._placed(candidate)
        return replace(candidate, path=self._shifted(candidate.path))

    def _priced(self, prices: tuple[int, ...]) -> tuple[int, ...]:
        """Memory is dearer or cheaper for one stage, or for all."""
        step = self.random.choice((-3, -1, 1, 3))
        one = self.random.randrange(2 * len(prices))
        last = len(self.judge.prices) - 1
        return tuple(
            min(max(price + step, 0), last) if j == one or one >= len(prices) else price
            for j, price in enumerate(prices)
        )

    def _placed(self, candidate: Candidate) -> Candidate:
        """Stages elsewhere: two change places, one moves, is cut in two or joined to the next."""
        path, device_of, prices = map(list, (candidate.path, candidate.device_of, candidate.prices))
        n, p = len(device_of), self.problem.n_devices
        j, k = self.random.randrange(n), self.random.randrange(n)
        kind = self.random.choice(("swap", "move", "cut", "join"))
        if kind == "swap":
            device_of[j], device_of[k] = device_of[k], device_of[j]
        elif kind == "move":
            device_of[j] = self.random.randrange(p)
        elif kind == "cut":
            if path[j + 1] - path[j] > 1 and n < p * max(self.problem.loops):
                path.insert(j + 1, self.random.randrange(path[j] + 1, path[j + 1]))
                device_of.insert(j + self.random.randrange(2), self.random.randrange(p))
                prices.insert(j, prices[j])
        elif j + 1 < n:
            del path[j + 1]
            del device_of[j + self.random.randrange(2)]
            del prices[j]
        if len(set(device_of)) < p:  # every device has a stage
            return candidate
        return replace(
            candidate, path=tuple(path), device_of=tuple(device_of), prices=tuple(prices)
        )

    def _shifted(self, path: Path) -> Path:
        end, n = path[-1], len(path) - 1
        j = self.random.randrange(1, n)
        step = self.random.choice((-1, 1)) * self.random.randint(1, _FARTHEST)
        moved = [*path]
        kind = self.random.random()
        if kind < 0.4:  # the others in proportion
            to = min(max(path[j] + step, j), end - (n - j))
            moved[1:j] = [round(e * to / path[j]) for e in path[1:j]]
            after = (end - to) / (end - path[j])
            moved[j + 1 : -1] = [end - round((end - e) * after) for e in path[j + 1 : -1]]
            moved[j] = to
        else:  # one alone, or a few together
            last = j if kind < 0.7 else self.random.randrange(j, n)
            for k in range(j, last + 1):
                moved[k] += step
        return spread(moved, end)

    def _polished(self, climb: _Climb, n_left: int) -> Found:
        """The same cuts in a better order, unless the order is given."""
        best = climb.best
        tries = int(_POLISH * self.budget / n_left / _PIECES / max(1, len(best.ran[0])))
        for _ in range(_PIECES if self.problem.table is None else 0):
            if self._is_over(climb):
                break
            candidate = replace(best.candidate, table=None)
            polished = self.judge.near(candidate, best, tries, self.random.randrange(2**31))
            if polished.worth < best.worth:
                best = climb.best = polished
        return best


def tables(n_devices: int, n_microbatches: int, loops: Sequence[int]) -> Iterator[Schedule]:
    """The named schedules with as many stages a device."""
    for name in order.NAMES:
        usual = order.usual_loops(name, n_devices)
        for count in loops if name in order.LOOPED and n_devices > 1 else (usual,):
            if count in loops:
                yield order.build(name, n_devices, n_microbatches, count)


def table_of(found: Found, n_devices: int) -> Schedule:
    """The step that ran as a table."""
    rows: list[list[Action]] = [[] for _ in range(n_devices)]
    for d, kind, j, i in zip(*(x.tolist() for x in found.ran[:4]), strict=True):
        rows[d].append(Action(j, KINDS[kind], i))
    return Schedule(tuple(map(tuple, rows)))
