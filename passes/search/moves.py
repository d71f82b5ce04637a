"""The search's moves: from one candidate to another near it."""

from dataclasses import replace
from random import Random

from fxpipe.passes.search.judge import Candidate, Found, Judge, SearchProblem

_DRAWN = (1, 16, 64, 256)  # ways to move bounds that one is chosen of
_HALVED = 0.1  # how often the move is of how many backwards are halved


def moved(found: Found, judge: Judge, random: Random) -> Candidate:
    """One random move; the candidate itself where there is nothing to move.

    Of several ways to move bounds, the one after which the step is likely to be shortest.
    """
    candidate, problem, n_prices = found.candidate, judge.problem, len(judge.prices)
    kind = random.random()
    if n_prices > 1 and kind < 0.2:
        return replace(candidate, prices=_priced(candidate.prices, n_prices, random))
    if len(judge.halvings) > 1 and candidate.table is None and random.random() < _HALVED:
        return replace(candidate, halved=_halved(candidate.halved, problem.n_microbatches, random))
    if len(candidate.path) == 2:
        return candidate
    if candidate.table is None and kind > 0.7:
        return _placed(candidate, problem, random)
    # Where it does not fit, the step's length says nothing.
    n_drawn = 1 if found.worth[0] else random.choice(_DRAWN)
    return replace(candidate, path=judge.shifted(found, n_drawn, random.randrange(2**31)))


def _halved(halved: int, n_microbatches: int, random: Random) -> int:
    """Some more backwards in halves, or some less."""
    return min(max(halved + random.choice((-4, -1, 1, 4)), 0), n_microbatches)


def _priced(prices: tuple[int, ...], n_prices: int, random: Random) -> tuple[int, ...]:
    """Memory is dearer or cheaper for one stage, or for all."""
    step = random.choice((-8, -3, -1, 1, 3, 8))
    one = random.randrange(2 * len(prices))
    last = n_prices - 1
    return tuple(
        min(max(price + step, 0), last) if j == one or one >= len(prices) else price
        for j, price in enumerate(prices)
    )


def _placed(candidate: Candidate, problem: SearchProblem, random: Random) -> Candidate:
    """Stages elsewhere: two change places, one moves, is cut in two or joined to the next."""
    path, device_of, prices = map(list, (candidate.path, candidate.device_of, candidate.prices))
    n, p = len(device_of), problem.n_devices
    j, k = random.randrange(n), random.randrange(n)
    kind = random.choice(("swap", "move", "cut", "join"))
    if kind == "swap":
        device_of[j], device_of[k] = device_of[k], device_of[j]
    elif kind == "move":
        device_of[j] = random.randrange(p)
    elif kind == "cut":
        if path[j + 1] - path[j] > 1 and n < p * max(problem.loops):
            path.insert(j + 1, random.randrange(path[j] + 1, path[j + 1]))
            device_of.insert(j + random.randrange(2), random.randrange(p))
            prices.insert(j, prices[j])
    elif j + 1 < n:
        del path[j + 1]
        del device_of[j + random.randrange(2)]
        del prices[j]
    if len(set(device_of)) < p:  # every device has a stage
        return candidate
    return replace(candidate, path=tuple(path), device_of=tuple(device_of), prices=tuple(prices))
