"""What an action takes besides its ops."""

import torch

from fxpipe.overhead import action_ms


def test_an_action_of_a_stage_that_does_next_to_nothing_takes_time() -> None:
    assert action_ms() > 0


def test_random_numbers_and_modes_are_left_as_they_were() -> None:
    before = torch.get_rng_state()
    action_ms()
    assert torch.equal(torch.get_rng_state(), before)
