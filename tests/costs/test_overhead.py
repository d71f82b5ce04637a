"""What an action takes besides its ops."""

import pytest
import torch

from fxpipe.costs.overhead import action_ms
from fxpipe.runtime.device_names import parse_devices


@pytest.mark.parametrize("n_lanes", [1, 3])
def test_an_action_of_a_stage_that_does_next_to_nothing_takes_time(n_lanes: int) -> None:
    assert action_ms(parse_devices(f"cpu*{n_lanes}")) > 0


def test_random_numbers_and_modes_are_left_as_they_were() -> None:
    before = torch.get_rng_state()
    action_ms(parse_devices("cpu*2"))
    assert torch.equal(torch.get_rng_state(), before)
