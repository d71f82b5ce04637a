"""Bytes are counted while they live, real and fake."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpipe.costs.counted import bytes_added, most_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("fake", [False, True])
def test_what_is_gone_again_counts_no_more(fake):
    mode = FakeTensorMode() if fake else torch.enable_grad()
    with mode:
        x = torch.ones(1000)

        def run():
            for _ in range(3):
                y = x * 2  # 4000 bytes, beside those of the round before
                y.view(10, 100).add_(1)
            return y

        result, n_bytes = most_bytes(run, CPU)
    assert result.shape == (1000,)
    assert n_bytes == 8000


def test_backward_counts_too():
    x = torch.ones(1000, requires_grad=True)
    y = x.exp()
    assert most_bytes(lambda: y.sum().backward(), CPU)[1] >= 4000


def test_what_is_let_go_of_makes_room():
    def run(given):
        first = given.pop() * 2  # beside the four that are there
        del first
        given.clear()
        return torch.ones(2000)

    assert bytes_added(lambda: [torch.ones(1000) for _ in range(4)], run, CPU) == 4000
