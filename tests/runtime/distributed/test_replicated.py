"""What closures of all ranks give the pipeline is compared by some of its numbers."""

import pickle

import pytest
import torch

from fxpipe.errors import InputError
from fxpipe.runtime.distributed.replicated import numbers_of, refuse_differing, sampled

X = torch.linspace(-1, 1, 1000).reshape(10, 100)


def told(x):
    return numbers_of(sampled(0, {"x": x}))


def test_other_ranks_are_told_numbers_and_no_tensor_of_a_device_that_they_lack():
    ((name, numbers),) = told(X)
    assert name == "another x in micro-batch 0"
    assert 32 < len(numbers) <= 64
    assert b"torch" not in pickle.dumps(told(X))


@pytest.mark.parametrize(
    "other", [-X, 2 * X, X[:, :50], X.to(torch.complex64)], ids=["sign", "scale", "shape", "kind"]
)
def test_other_data_is_refused_and_the_rank_named(other):
    with pytest.raises(InputError, match="rank 1's closure gave the pipeline another x in micro"):
        refuse_differing([told(X), told(other)])


def test_another_rounding_is_none_nor_is_what_no_rank_has():
    refuse_differing([told(X), told(X * (1 + 1e-3))])
    refuse_differing([told(X.bfloat16()), told(X)])
    refuse_differing([told(X[:0]), told(X[:0])])
    refuse_differing([[("gradient", None)], [("gradient", None)]])
