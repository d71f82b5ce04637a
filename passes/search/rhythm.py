"""Orders for memory that is short: each micro-batch does as the one before it, a period later.

Devices that choose begin as many forwards as they have room for, and then have none for what these
need next. In a rhythm, what they hold is the same in each period.
"""

from dataclasses import astuple, dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from fxpipe.passes.search import rhythm_kernel as kernel
from fxpipe.passes.search.judge import Candidate, Judge


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How a micro-batch goes through the stages, as `rhythm_kernel.rhythm` has it."""

    slack: float
    pace: float
    gap: float
    late: float
    apart: bool

    def order(self, candidate: Candidate, judge: Judge) -> NDArray[np.float64]:
        """Of each F, backward and W by stage and micro-batch, how many actions are before it."""
        path = list(candidate.path)
        forward_ms, backward_ms, weight_ms = (np.diff(by[path]) for by in judge.by_place[:3])
        order: NDArray[np.float64] = kernel.rhythm(
            forward_ms,
            backward_ms - weight_ms,
            weight_ms,
            np.array(candidate.device_of, np.int64),
            judge.problem.n_microbatches,
            *astuple(self),
        )
        return order


def drawn(random: Random) -> Rhythm:
    """Any rhythm; often without slack, a gap, or time before W."""
    return Rhythm(
        slack=max(1.0, random.uniform(0.85, 1.25)),
        pace=random.uniform(1.0, 2.0),
        gap=max(0.0, random.uniform(-0.3, 0.7)),
        late=max(0.0, random.uniform(-0.3, 1.0)),
        apart=random.random() < 0.6,
    )


def near(rhythm: Rhythm, random: Random) -> Rhythm:
    """One that is a little different."""
    return Rhythm(
        slack=max(1.0, rhythm.slack + random.uniform(-0.05, 0.05)),
        pace=max(1.0, rhythm.pace * 1.2 ** random.uniform(-1.0, 1.0)),
        gap=max(0.0, rhythm.gap + random.uniform(-0.15, 0.15)),
        late=max(0.0, rhythm.late + random.uniform(-0.2, 0.2)),
        apart=rhythm.apart != (random.random() < 0.1),
    )
