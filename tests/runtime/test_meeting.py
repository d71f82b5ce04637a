"""What ranks must agree on as a call begins."""

from dataclasses import replace

import pytest
import torch

from fxpipe.errors import InputError
from fxpipe.runtime.meeting import Given, Word, agreed

GIVEN = Given((2, 1), (("batch", 3),), (torch.float32,), (False,))
WORD = Word("a step", True, GIVEN, None, None)


def test_inputs_on_one_rank_are_enough():
    assert agreed([replace(WORD, given=None), WORD]) == GIVEN
    assert agreed([WORD, WORD]) == GIVEN


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(WORD, problem="no x"), "rank 1: no x"),
        (replace(WORD, training=False), "rank 1 is in eval mode, rank 0 in training mode"),
        (replace(WORD, what="an input"), "rank 1 was called with an input, rank 0 with a step"),
        (
            replace(WORD, given=replace(GIVEN, gradients=(True,))),
            "of batch 3, torch.float32, 0 of them with a gradient; rank 1 of batch 3, "
            "torch.float32, 1 of them with a gradient",
        ),
    ],
)
def test_ranks_that_differ_are_named_with_both_values(other, message):
    with pytest.raises(InputError) as caught:
        agreed([WORD, other])
    assert message in str(caught.value)


def test_no_inputs_at_all():
    nobody = replace(WORD, given=None)
    with pytest.raises(InputError, match="no rank was given inputs"):
        agreed([nobody, nobody])
