"""What devices are given, whichever they are."""

import torch

from fxpipe.runtime.stream import threads_per_lane

CPU = torch.device("cpu")


def test_a_lane_beside_others_has_one_thread():
    torch.set_num_threads(2)
    assert threads_per_lane([CPU] * 4) == threads_per_lane([CPU] * 2) == 1
    assert threads_per_lane([CPU]) == 2
