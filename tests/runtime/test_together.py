"""Lanes of one GPU share its memory: what is predicted of it is what they hold together."""

from dataclasses import replace

from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.runtime.memory import Memory
from fxpipe.runtime.virtual import VirtualDevice

ESTIMATE = EstimateSpec(step_ms=9.0, bubble=0.0, peak_bytes=(100, 105), together_bytes=115)
ON_ONE = [VirtualDevice(0, 2, 0), VirtualDevice(0, 2, 1)]
ON_TWO = [VirtualDevice(0, 2, 0), VirtualDevice(1, 2, 0)]


def predicted(devices, estimate=ESTIMATE):
    return [peak.predicted_bytes for peak in Memory(devices, estimate, [], print, 0).peaks]


def test_lanes_that_share_a_gpu_are_not_full_at_the_same_time():
    assert predicted(ON_ONE) == [115]


def test_lanes_that_share_nothing_have_peaks_of_their_own():
    assert predicted(ON_TWO) == [100, 105]


def test_a_rank_has_its_own_lane_alone():
    assert predicted(ON_ONE[1:], replace(ESTIMATE, peak_bytes=(105,))) == [105]


def test_where_no_more_is_known_all_are_at_their_fullest_at_once():
    assert predicted(ON_ONE, replace(ESTIMATE, together_bytes=None)) == [205]
