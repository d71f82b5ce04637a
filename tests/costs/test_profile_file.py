"""Profiles in files: what is written comes back, and what is wrong is named."""

import json
import math
from dataclasses import replace

import pytest

from fxpipe.costs.profile_file import load_profile, save_profile
from fxpipe.errors import InputError
from fxpipe.ir import Link, LossCost, Network, OpCost, Profile

PROFILE = Profile(
    costs={"a": OpCost(1.5, 2.5, (("b", 8),), 16, shapes_of=("weight",))},
    network=Network(Link(0.01, math.inf), {(0, 1): Link(0.02, 5e6), (1, 0): Link(0.03, 6e6)}),
    device="cpu",
    capacity_bytes=2**30,
    batch=2,
    fingerprint="f",
    loss=LossCost(0.5, 64),
)


def test_profiles_come_back_from_their_file(tmp_path):
    save_profile(PROFILE, tmp_path / "costs.json")
    assert load_profile(tmp_path / "costs.json") == PROFILE


def test_a_profile_may_know_of_no_loss(tmp_path):
    without = replace(PROFILE, loss=None)
    save_profile(without, tmp_path / "costs.json")
    assert load_profile(tmp_path / "costs.json") == without


def test_what_an_earlier_version_did_not_know_may_be_lacking(tmp_path):
    save_profile(PROFILE, tmp_path / "costs.json")
    data = json.loads((tmp_path / "costs.json").read_text())
    for name in ("added_bytes", "shapes_of"):
        del data["costs"]["a"][name]
    (tmp_path / "costs.json").write_text(json.dumps(data))
    cost = replace(PROFILE.costs["a"], shapes_of=())
    assert load_profile(tmp_path / "costs.json") == replace(PROFILE, costs={"a": cost})


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"costs": {"a": 1}}'])
def test_a_file_that_is_no_profile_is_refused(text, tmp_path):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(InputError, match=r"costs\.json is no profile .*: write one with"):
        load_profile(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("costs", "a", "forward_ms"), -1, "forward_ms of a is -1, a negative cost"),
        (("costs", "a", "backward_ms"), math.nan, "backward_ms of a is nan, not a number"),
        (("costs", "a", "forward_ms"), "fast", "forward_ms of a is 'fast', not a number"),
        (("costs", "a", "saved"), [["b", -8]], "the bytes that a saves of b is -8"),
        (("costs", "a", "weight_gradient_ms"), 3, "the backward of a takes 2.5 ms, its part .* 3"),
        (("network", "pairs", "0>1", "bytes_per_ms"), 0, "bandwidth of the link 0>1 is 0"),
        (("network", "link", "latency_ms"), -1, "latency of the link is -1"),
        (("capacity_bytes",), 0, "capacity_bytes is 0"),
        (("loss", "ms"), -1, "ms of the loss is -1, a negative cost"),
    ],
)
def test_a_wrong_number_is_named(place, value, says, tmp_path):
    save_profile(PROFILE, tmp_path / "costs.json")
    data = json.loads((tmp_path / "costs.json").read_text())
    *path, last = place
    inside = data
    for key in path:
        inside = inside[key]
    inside[last] = value
    (tmp_path / "costs.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=says):
        load_profile(tmp_path / "costs.json")
