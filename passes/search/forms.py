"""What a search begins with: stages made alike, in many numbers and sizes, each device in its turn.

All micro-batches wait for the longest of neighbouring stages, so these are alike, where messages
are short; but small first stages let devices begin soon, and small last ones turn soon. How many
stages there are, how small the first and last, and what a message counts, is drawn: near the best
that were found, or anew.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from fxpipe.passes.search import rhythm
from fxpipe.passes.search.fit import fitted
from fxpipe.passes.search.judge import Candidate, Found, Judge
from fxpipe.passes.search.rhythm import Rhythm
from fxpipe.schedule import Schedule

# How often a form is drawn anew, of how many of the best another is near, and how far at most.
_ANEW, _BEST, _FACTOR = 0.15, 8, 1.5
# How often shares follow what devices had too much to do, how far, and how much longer a step is
# than the best for which that is not done.
_FOLLOWED, _STEP, _HOPELESS = 5, 0.7, 1.06
_ROUNDS = 2  # of ranks, by which devices choose
_TRIES = 100  # to better the order of a rhythm
_PAIRS = 130  # of places: as many are looked at, to make stages alike, in the time of an action


@dataclass(frozen=True, slots=True)
class Form:
    """`n_stages`, round and round or back and forth; the last is moved on by `shift` devices.

    Their shares grow from `first` to 1 over `growing` stages and fall to `last` over `falling`.
    `message_price` is what a message counts where bounds are placed (alike_kernel.py), `price` the
    step of memory's, `halved` as in a Candidate; `group` and `patience` say how devices choose
    (rank_kernel.py), or the `rhythm` in which order they run.
    """

    n_stages: int
    back: bool
    shift: int
    growing: int
    first: float
    falling: int
    last: float
    message_price: float
    price: int
    halved: int
    group: int
    patience: float
    rhythm: Rhythm | None

    def device_of(self, n_devices: int) -> tuple[int, ...]:
        """The device of each stage; none is left without one."""
        turns = [divmod(j, n_devices) for j in range(self.n_stages)]
        devices = [n_devices - 1 - d if self.back and turn % 2 else d for turn, d in turns]
        moved = (*devices[:-1], (devices[-1] + self.shift) % n_devices)
        return moved if len(set(moved)) == len(set(devices)) else tuple(devices)

    def shares(self) -> NDArray[np.float64]:
        """How large each stage is to be, to the others."""
        n, shares = self.n_stages, np.ones(self.n_stages)
        for k in range(min(self.growing, n)):
            shares[k] *= self.first + (1 - self.first) * k / self.growing
        for k in range(min(self.falling, n)):
            shares[-1 - k] *= self.last + (1 - self.last) * k / self.falling
        return shares


class Forms:
    """Draws forms for one problem, and keeps the best found of each map of stages to devices."""

    def __init__(
        self,
        judge: Judge,
        price: int,
        random: Random,
        *,
        short: bool = False,
        table: Schedule | None = None,
    ) -> None:
        """`price` is the step of memory's to begin with; where memory is `short`, forms have a
        rhythm. With a `table` devices follow it.
        """
        self.judge = judge
        self.price = price
        self.table = table
        self.random = random
        self.short = short
        self.best: dict[tuple[int, ...], Found] = {}
        self._tried: list[tuple[tuple[int, float], Form]] = []  # the best, in order

    def draw(self, work: float, is_enough: Callable[[Found], bool]) -> float:
        """As many as can be judged by simulating `work` actions; gives how many that took."""
        left = work
        while left > 0:
            form = self._next()
            found, taken = self._judged(form)
            left -= taken
            insort(self._tried, (found.worth, form), key=lambda tried: tried[0])
            del self._tried[_BEST:]
            known = self.best.get(found.candidate.device_of)
            if known is None or found.worth < known.worth:
                self.best[found.candidate.device_of] = found
            if is_enough(found):
                break
        return work - left

    def _judged(self, form: Form) -> tuple[Found, float]:
        """The best of a form, its shares made to follow what devices have too much to do."""
        judge, problem = self.judge, self.judge.problem
        p, n, table = problem.n_devices, form.n_stages, self.table
        device_of = form.device_of(p) if table is None else table.stage_to_device
        shares, best, work = form.shares(), None, 0.0
        for _ in range(_FOLLOWED):
            path = judge.alike(shares, form.message_price)
            candidate = Candidate(path, device_of, (form.price,) * n, form.halved, table)
            found = self._run(candidate, form)
            work += found.work + len(problem.edges) ** 2 / _PAIRS
            if best is None or found.worth < best.worth:
                best = found
            if self._is_hopeless(found):
                break
            shares = shares * judge.leisure(found) ** _STEP
        assert best is not None
        found = fitted(judge, best)
        return found, work + found.work - best.work

    def _run(self, candidate: Candidate, form: Form) -> Found:
        if form.rhythm is None:
            return self.judge.by(candidate, ((form.group, form.patience),), _ROUNDS)
        order, seed = form.rhythm.order(candidate, self.judge), self.random.randrange(2**31)
        return self.judge.reordered(candidate, order, _TRIES, seed)

    def _is_hopeless(self, found: Found) -> bool:
        if not self._tried:
            return False
        over, step_ms = self._tried[0][0]
        return not over and found.worth[1] > _HOPELESS * step_ms

    def _next(self) -> Form:
        if not self._tried or self.random.random() < _ANEW:
            return self._anew()
        return self._near(self.random.choice(self._tried)[1])

    def _numbers_of_stages(self) -> tuple[int, int]:
        problem = self.judge.problem
        if self.table is not None:
            return self.table.n_stages, self.table.n_stages
        most = min(max(problem.loops) * problem.n_devices, len(problem.edges) - 1)
        return min(min(problem.loops) * problem.n_devices, most), most

    def _anew(self) -> Form:
        random, p = self.random, self.judge.problem.n_devices
        return Form(
            n_stages=random.randint(*self._numbers_of_stages()),
            back=random.random() < 0.3,
            shift=random.choice((0, random.randrange(p))),
            growing=random.randint(0, 3 * p),
            first=random.uniform(0.05, 1.0),
            falling=random.randint(0, 2 * p),
            last=random.uniform(0.1, 1.0),
            message_price=10 ** random.uniform(-1.0, 0.5),
            price=self.price,
            halved=random.choice(self.judge.halvings),
            group=random.choice((1, p, self.judge.problem.n_microbatches)),
            patience=random.choice((0.0, 1.0)),
            rhythm=rhythm.drawn(random) if self.short else None,
        )

    def _near(self, form: Form) -> Form:
        random, p = self.random, self.judge.problem.n_devices
        fewest, most = self._numbers_of_stages()
        n_prices = len(self.judge.prices)

        def factor() -> float:
            return float(_FACTOR ** random.uniform(-1.0, 1.0))

        return replace(
            form,
            n_stages=min(max(form.n_stages + random.choice((-2, -1, 0, 0, 0, 1, 2)), fewest), most),
            shift=form.shift if random.random() < 0.8 else random.randrange(p),
            growing=max(0, form.growing + random.randint(-3, 3)),
            first=min(1.2, form.first * factor()),
            falling=max(0, form.falling + random.randint(-2, 2)),
            last=min(1.2, form.last * factor()),
            message_price=form.message_price * factor(),
            price=min(max(form.price + random.choice((-5, -2, 0, 0, 0, 2, 5)), 0), n_prices - 1),
            halved=form.halved if random.random() < 0.8 else random.choice(self.judge.halvings),
            rhythm=form.rhythm and rhythm.near(form.rhythm, random),
        )
