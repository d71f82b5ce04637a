"""Memory as the user says it."""

import pytest

from fxpipe.costs.capacity import capacities
from fxpipe.costs.numbers import UNLIMITED
from fxpipe.errors import InputError


def test_one_amount_is_every_devices():
    assert capacities("22GiB", 3) == (22 * 2**30,) * 3


def test_a_list_is_device_by_device():
    assert capacities("1.5GB, 512MiB,7kb,8b", 4) == (1_500_000_000, 512 * 2**20, 7000, 8)


def test_the_most_is_what_a_device_without_a_limit_holds():
    assert capacities("4194304TiB", 1) == (UNLIMITED,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0GiB", "0GiB of memory holds nothing"),
        ("22GiB,-1GB", "-1GB of memory holds nothing"),
        ("8GiB,4194305TiB", "4194305TiB of memory has more than plans count: give it 4194304TiB"),
        ("9" * 400 + "GiB", "99 of memory has more than plans count"),
        ("22", "'22' is no amount of memory: write 22GiB"),
        (22 * 2**30, "'23622320128' is no amount of memory: write 22GiB"),
        ("a lot", "'a lot' is no amount"),
        ("22XB,", "'22XB' is no amount"),
        ("1GiB,2GiB,3GiB", "is of 3 devices, but --devices has 2"),
    ],
)
def test_what_is_none_is_told(text, says):
    with pytest.raises(InputError, match=says):
        capacities(text, 2)
