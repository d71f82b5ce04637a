"""What devices are given, whichever they are."""

import torch

from fxpipe.runtime.stream import capacities, threads_per_lane

CPU = torch.device("cpu")


def test_a_lane_beside_others_has_one_thread():
    torch.set_num_threads(2)
    assert threads_per_lane([CPU] * 4) == threads_per_lane([CPU] * 2) == 1
    assert threads_per_lane([CPU]) == 2


def test_a_gpu_can_hold_what_is_free_and_what_the_allocator_has(monkeypatch):
    """The rest of it is taken, by its context or by other processes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert capacities([first, second]) == [80, 80]
    assert capacities([first, first]) == [40, 40]
