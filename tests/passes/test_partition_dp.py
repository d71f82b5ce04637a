"""The windows of dynamic programming, against all runs of blocks and all cuts of small chains."""

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest
from chains import KIB, random_chain

from fxpipe.ir import Chain, CheckpointMode, Link, Network
from fxpipe.passes import checkpoints, order, partition_dp
from fxpipe.passes.partition import Problem
from fxpipe.passes.partition_costs import edges_of
from fxpipe.passes.partition_window_kernel import least_communication

N_STAGES, ROOM = 3, 500 * KIB


def problem_of(random: Random) -> Problem:
    """Blocks of which some need much while they run."""
    chain = random_chain(random, 12)
    sizes = (random.choice((0, random.randint(1, 400) * KIB)) for _ in chain.blocks)
    blocks = tuple(
        replace(block, forward_workspace_bytes=size, backward_workspace_bytes=size // 2)
        for block, size in zip(chain.blocks, sizes, strict=True)
    )
    chain = replace(chain, blocks=blocks)
    return Problem(
        chain=chain,
        n_stages=N_STAGES,
        schedule=order.build("1f1b", N_STAGES, 4, 1),
        checkpoint=checkpoints.place(CheckpointMode.NEVER, N_STAGES),
        network=Network(Link(0.02, 1e4)),
        capacity_bytes=(ROOM,) * N_STAGES,
        edges=edges_of(chain),
    )


def needed_bytes(chain: Chain, begin: int, end: int) -> int:
    """What the blocks [begin, end) need with two micro-batches saved and nothing received."""
    blocks = chain.blocks[begin:end]
    parameters, saved = (
        sum(size for block in blocks for _, size in getattr(block, kind))
        for kind in ("parameters", "saved")
    )
    workspace = max((block.forward_workspace_bytes for block in blocks), default=0)
    return 2 * parameters + 2 * saved + workspace


@pytest.mark.parametrize("seed", range(10))
def test_a_stage_begins_at_the_first_place_from_which_it_fits(seed: int) -> None:
    problem = problem_of(Random(seed))
    edges, chain = problem.edges, problem.chain

    starts = partition_dp._first_starts(problem, [0] * len(edges), ((2, 2),), ROOM)

    for end, start in enumerate(starts):
        fitting = [e for e in range(end + 1) if needed_bytes(chain, edges[e], edges[end]) <= ROOM]
        assert start == fitting[0]


@pytest.mark.parametrize("seed", range(20))
def test_of_all_cuts_with_short_waits_those_that_send_least(seed: int) -> None:
    random = np.random.default_rng(seed)
    atoms = 9
    wait_ms = np.cumsum(random.uniform(0, 1, (N_STAGES, atoms + 1)), axis=1)
    sends_ms = random.uniform(0, 1, atoms + 1)
    first_starts = np.maximum(np.arange(atoms + 1) - random.integers(3, 7), 0)
    limit_ms = random.uniform(1.5, 4)

    found = least_communication(wait_ms, sends_ms, np.array([first_starts] * N_STAGES), limit_ms)

    ways = [(0, *inner, atoms) for inner in combinations(range(1, atoms), N_STAGES - 1)]
    allowed = {
        sum(sends_ms[e] for e in way[1:-1]): way
        for way in ways
        if all(
            wait_ms[j, end] - wait_ms[j, start] <= limit_ms and start >= first_starts[end]
            for j, (start, end) in enumerate(pairwise(way))
        )
    }
    assert tuple(found) == (allowed[min(allowed)] if allowed else ())
