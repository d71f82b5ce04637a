"""What ranks must agree on as a call begins."""

from dataclasses import replace

import pytest
import torch

from fxpipe.errors import InputError
from fxpipe.runtime.meeting import Given, Word, agreed

GIVEN = Given((2, 1), (("batch", 3),), (torch.float32,), (False,))
NOTHING = Given((), (), (None,), (None,))
WORD = Word("a step", True, GIVEN, None, None)


def test_inputs_on_one_rank_are_enough():
    assert agreed([replace(WORD, given=NOTHING), WORD], 2) == [GIVEN]
    assert agreed([WORD, WORD], 2) == [GIVEN]


def test_each_rank_may_have_some_of_the_inputs():
    x = Given((2, 1), (("batch", 3),), (torch.float32, None), (True, None))
    mask = Given((), (("width", 5),), (None, torch.bool), (None, False))
    both = Given((2, 1), (("batch", 3), ("width", 5)), (torch.float32, torch.bool), (True, False))
    for order in ([x, mask], [mask, x], [both, mask], [x, both]):
        (found,) = agreed([replace(WORD, given=each) for each in order], 2)
        assert replace(found, sizes=tuple(sorted(found.sizes))) == both
    wider = replace(mask, sizes=(("width", 6),))
    with pytest.raises(InputError, match=r"rank 1 was given inputs of width 5.*rank 2 of width 6"):
        agreed([replace(WORD, given=each) for each in (x, mask, wider)], 3)


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
    nobody = replace(WORD, given=NOTHING)
    with pytest.raises(InputError, match="none of ranks 2 to 3 was given inputs"):
        agreed([WORD, WORD, nobody, nobody], 2)


def test_replicas_batches_differ_in_size_alone():
    larger = replace(GIVEN, rows=(2, 2), sizes=(("batch", 4),))
    assert agreed([WORD, replace(WORD, given=larger)], 1) == [GIVEN, larger]
    other = replace(WORD, given=replace(GIVEN, dtypes=(torch.float64,)))
    with pytest.raises(InputError, match=r"replica 1 of batch 3, torch\.float64"):
        agreed([WORD, other], 1)
