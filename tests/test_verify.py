"""What counts as a difference between the package and the plain model."""

import math

import pytest
import torch

from fxpipe.difference import compare

NEGLIGIBLE = 1e-3
inf, nan = math.inf, math.nan


def difference(found, expected, **named):
    both = {"x": (found, expected), **named}
    return compare(
        "group",
        {name: None if f is None else torch.tensor(f) for name, (f, _) in both.items()},
        {name: None if e is None else torch.tensor(e) for name, (_, e) in both.items()},
        NEGLIGIBLE,
    )


def test_relative_is_to_the_largest_expected_element():
    found = difference([1.0, 4.5], [1.0, 4.0])
    assert (found.absolute, found.relative, found.worst) == (0.5, 0.125, "x")


def test_worst_tensor_is_named_by_relative_difference():
    found = difference([100.5], [100.0], small=([1.5], [1.0]))
    assert (found.absolute, found.relative, found.worst) == (0.5, 0.5, "small")


@pytest.mark.parametrize("noise", [1e-17, 0.0])
def test_rounding_noise_beside_large_tensors_is_no_difference(noise):
    found = difference([1.0], [1.0], bias=([noise], [-3e-17]))
    assert found.relative <= 5e-17 / NEGLIGIBLE


def test_small_tensors_still_count():
    assert difference([1.0], [1.0], bias=([2e-3], [1e-3])).relative > 0.9


def test_counters_do_not_make_small_floats_negligible():
    assert difference([1e-6], [2e-6], counter=([1000], [1000])).relative == 0.5


def test_equal_tensors_and_two_missing_gradients_are_equal():
    found = difference([1.0, nan, inf], [1.0, nan, inf], frozen=(None, None), empty=([], []))
    assert (found.absolute, found.relative, found.missing) == (0, 0, ())


def test_gradient_on_one_side_only_is_named():
    assert difference([1.0], [1.0], one=(None, [0.0])).missing == ("one",)
    assert difference([1.0], [1.0], other=([0.0], None)).missing == ("other",)


@pytest.mark.parametrize(
    ("found", "expected"),
    [([nan], [1.0]), ([1.0], [nan]), ([inf], [1.0]), ([inf], [-inf]), ([1.0], [1.0, 1.0])],
)
def test_other_shapes_and_lone_infinities_are_infinitely_far(found, expected):
    assert difference(found, expected).relative == inf


def test_integers_and_bools_are_compared_too():
    assert difference([True, False], [True, True]).relative == 1
    assert difference([3], [3]).relative == 0


def test_an_imaginary_part_is_compared_too():
    found, expected = torch.tensor([3 + 4j]), torch.tensor([3 - 4j])
    assert compare("outputs", {"y": found.conj()}, {"y": expected}, 1.0).absolute == 0
    assert compare("outputs", {"y": found}, {"y": expected}, 1.0).absolute == 8
