"""What ranks must agree on as a call begins."""

from dataclasses import replace

import pytest
import torch

from fxpipe.errors import InputError
from fxpipe.runtime.meeting import Given, Word, agreed

GIVEN = Given((2, 1), (("batch", 3),), (torch.float32,), (False,))
WORD = Word("a step", True, GIVEN, None, None)


def test_inputs_on_one_rank_are_enough():
    assert agreed([replace(WORD, given=None), WORD], 2) == [GIVEN]
    assert agreed([WORD, WORD], 2) == [GIVEN]


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
        agreed([WORD, other], 2)
    assert message in str(caught.value)


def test_no_inputs_at_all():
    nobody = replace(WORD, given=None)
    with pytest.raises(InputError, match="none of ranks 2 to 3 was given inputs"):
        agreed([WORD, WORD, nobody, nobody], 2)


def test_replicas_batches_differ_in_size_alone():
    larger = replace(GIVEN, rows=(2, 2), sizes=(("batch", 4),))
    assert agreed([WORD, replace(WORD, given=larger)], 1) == [GIVEN, larger]
    other = replace(WORD, given=replace(GIVEN, dtypes=(torch.float64,)))
    with pytest.raises(InputError, match=r"replica 1 of batch 3, torch\.float64"):
        agreed([WORD, other], 1)
