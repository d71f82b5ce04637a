"""Devices that share a memory: what they hold as their ops are launched."""

import numpy as np
from test_simulate import FREE

from fxpipe.passes.simulate import simulate
from fxpipe.passes.simulate_costs import StageCost
from fxpipe.passes.simulate_together import together_bytes
from fxpipe.schedule import Schedule

STAGES = [StageCost(1.0, 1.0, static_bytes=100, saved_bytes=10, backward_workspace_bytes=1000)] * 2


def together(table, *ends):
    """As each action, row by row, is launched by then; a microsecond before it had yet to be."""
    schedule = Schedule.from_csv(table)
    never = [[False] * schedule.n_microbatches] * 2
    launched = np.stack((np.array(ends) - 1e-3, np.array(ends, float)))
    peaks = simulate(schedule, STAGES, [], FREE, never).peak_bytes
    return together_bytes(schedule, STAGES, [], FREE, never, launched), sum(peaks)


def test_who_waits_for_another_is_not_at_its_fullest_beside_it():
    found, at_most = together("0F0,0B0\n1F0,1B0\n", 1, 4, 2, 3)
    assert at_most == 2 * (100 + 10 + 1000)
    assert found == 2 * (100 + 10) + 1000


def test_what_could_be_launched_takes_turns_with_what_is():
    """Stage 0's second backward begins beside stage 1's first, whose thread is at it for long."""
    found, at_most = together("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n", 1, 2, 5, 7, 3, 4, 4, 6)
    assert found == 2 * 100 + 4 * 10 + 2 * 1000 - 10
    assert found < at_most
