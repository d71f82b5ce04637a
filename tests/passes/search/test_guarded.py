"""Devices that choose keep room for what their oldest micro-batches still need."""

from itertools import product

import numpy as np
import pytest
from chains import KIB, block, plain
from searches import problem

from fxpipe.ir import Link, Network
from fxpipe.passes.search.judge import Candidate, Found, Judge

P, M, STAGES = 2, 5, 6
# Each device has 3 stages: room for 3 micro-batches and a stage of another.
CAPACITY = 10 * 8 * KIB
CANDIDATE = Candidate(tuple(range(STAGES + 1)), (0, 1) * 3, (0,) * STAGES, M)


def judge(recompute: bool) -> Judge:
    blocks = [block(f"b{k}", 1.0, 2.0, saved=8 * KIB) for k in range(STAGES)]
    free = Network(Link(0.0, 1e30))
    return Judge(problem(plain(blocks, 0), P, M, CAPACITY, recompute, free))


def left_for_older(found: Found) -> list[int]:
    """Of each F, how many stages more its device has room for than older micro-batches need."""
    devices, kinds, stages, microbatches, starts, ends = found.ran[:6]
    left = []
    for d, i, begin in zip(
        devices[kinds == 0], microbatches[kinds == 0], starts[kinds == 0], strict=True
    ):
        here = (devices == d) & (starts <= begin)
        done = (devices == d) & (ends <= begin) & (kinds != 0) & (kinds != 2)
        begun = {(j, k) for j, k in zip(stages[here], microbatches[here], strict=True)}
        held = len(begun) - int(done.sum())
        own = [j for j in range(STAGES) if j % P == d]
        needed = sum((j, older) not in begun for j, older in product(own, range(i)))
        left.append(CAPACITY // (8 * KIB) - held - needed)
    return left


@pytest.mark.parametrize("recompute", [False, True])
def test_no_forward_takes_the_room_of_older_micro_batches(recompute: bool) -> None:
    found = judge(recompute).by(CANDIDATE, ((1, 0.0),), 1)

    assert found.worth[0] == 0
    # Where blocks can be computed again, it is that of the oldest alone.
    assert (min(left_for_older(found)) < 0) == recompute


def test_an_order_that_needs_too_much_becomes_one_that_fits() -> None:
    eager = np.arange(3 * STAGES * M, dtype=np.float64).reshape(3, STAGES, M)
    eager[1] = eager[1, ::-1]  # all forwards, then all gradients, from the last stage on

    assert judge(False).reordered(CANDIDATE, eager, 0, 0).worth[0] == 0
