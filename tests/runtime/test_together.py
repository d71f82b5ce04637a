"""Lanes of one GPU share its memory: what is predicted of it is what they hold together."""

from dataclasses import replace

import pytest

from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.runtime.memory import Memory
from fxpipe.runtime.virtual import VirtualDevice

ESTIMATE = EstimateSpec(
    step_ms=9.0,
    bubble=0.0,
    peak_bytes=(100, 105),
    # The longest action takes 1 ms.
    timeline=("0F0 0.000 1.000, 0B0 8.000 9.000", "1F0 4.000 4.500, 1B0 4.500 5.000"),
    memory=("0.000 10;1.000 100;2.000 10", "0.000 5;4.000 105;5.000 5"),
)
ON_ONE = [VirtualDevice(0, 2, 0), VirtualDevice(0, 2, 1)]
ON_TWO = [VirtualDevice(0, 2, 0), VirtualDevice(1, 2, 0)]


def predicted(devices, estimate=ESTIMATE):
    return [peak.predicted_bytes for peak in Memory(devices, estimate, [], print, 0).peaks]


def test_lanes_that_are_never_full_at_the_same_time():
    assert predicted(ON_ONE) == [10 + 105]


@pytest.mark.parametrize(("full_ms", "together"), [(3.999, 205), (3.0, 205), (0.0, 205)])
def test_each_may_be_an_action_ahead_or_behind(full_ms, together):
    second = f"0.000 5;{full_ms:.3f} 105;{full_ms + 0.5:.3f} 5"
    assert predicted(ON_ONE, replace(ESTIMATE, memory=(ESTIMATE.memory[0], second))) == [together]


def test_whoever_is_full_first():
    assert predicted(ON_ONE, replace(ESTIMATE, memory=ESTIMATE.memory[::-1])) == [10 + 105]


def test_lanes_that_share_nothing_have_peaks_of_their_own():
    assert predicted(ON_TWO) == [100, 105]


def test_a_rank_has_its_own_lane_alone():
    alone = replace(ESTIMATE, peak_bytes=(105,), memory=ESTIMATE.memory[1:])
    assert predicted(ON_ONE[1:], alone) == [105]


def test_where_memory_over_time_is_not_known_all_are_at_their_fullest_at_once():
    assert predicted(ON_ONE, replace(ESTIMATE, memory=())) == [205]
