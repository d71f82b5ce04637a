"""Profiles in files: what is written comes back, and what is wrong is named."""

import json
import math
from dataclasses import replace

import pytest

from fxpipe.costs.profile_file import load_profile, save_profile
from fxpipe.errors import InputError
from fxpipe.ir import Launch, Link, LossCost, Network, OpCost, Profile

PROFILE = Profile(
    costs={"a": OpCost(1.5, 2.5, (("b", 8),), 16, shapes_of=("weight",))},
    network=Network(Link(0.01, math.inf), {(0, 1): Link(0.02, 5e6), (1, 0): Link(0.03, 6e6)}),
    device="cpu",
    capacity_bytes=2**30,
    batch=2,
    fingerprint="f",
    loss=LossCost(0.5, 64, ("memory",)),
    launch=Launch(0.01, 0.02, 0.1, 0.05, 0.8),
    library_bytes=32,
)


def test_profiles_come_back_from_their_file(tmp_path):
    save_profile(PROFILE, tmp_path / "costs.json")
    assert load_profile(tmp_path / "costs.json") == PROFILE


def test_no_other_file_is_overwritten(tmp_path):
    for name, text in {"model.py": "import torch\n", "plan.json": '{"format": 8}'}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match="is there already, and is no profile"):
            save_profile(PROFILE, tmp_path / name)
        assert (tmp_path / name).read_text() == text
    for _ in range(2):
        save_profile(PROFILE, tmp_path / "costs.json")


def test_a_profile_may_know_of_no_loss_and_no_host(tmp_path):
    without = replace(PROFILE, loss=None, launch=None)
    save_profile(without, tmp_path / "costs.json")
    assert load_profile(tmp_path / "costs.json") == without


def test_what_an_earlier_version_did_not_know_may_be_lacking(tmp_path):
    save_profile(PROFILE, tmp_path / "costs.json")
    data = json.loads((tmp_path / "costs.json").read_text())
    for name in ("added_bytes", "freed_bytes", "shapes_of"):
        del data["costs"]["a"][name]
    del data["loss"]["unused"], data["launch"], data["library_bytes"]
    (tmp_path / "costs.json").write_text(json.dumps(data))
    cost = replace(PROFILE.costs["a"], shapes_of=())
    loss = LossCost(0.5, 64)
    known = replace(PROFILE, costs={"a": cost}, loss=loss, launch=None, library_bytes=0)
    assert load_profile(tmp_path / "costs.json") == known


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"costs": {"a": 1}}'])
def test_a_file_that_is_no_profile_is_refused(text, tmp_path):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(InputError, match=r"costs\.json is no profile .*: write one with"):
        load_profile(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("costs", "a", "forward_ms"), -1, r"forward_ms of a is a number from 0 to 1e\+09, not -1"),
        (("costs", "a", "forward_ms"), 10**400, r"forward_ms of a is .*, not 1000"),
        (("costs", "a", "backward_ms"), math.nan, "backward_ms of a is a number .*, not nan"),
        (("costs", "a", "forward_ms"), "fast", "forward_ms of a is a number .*, not 'fast'"),
        (("costs", "a", "forward_ms"), True, "forward_ms of a is a number .*, not True"),
        (("costs", "a", "backward_bytes"), 10**30, "backward_bytes of a is a whole number"),
        (("costs", "a", "arriving_bytes"), 1.5, "arriving_bytes of a is a whole number"),
        (("costs", "a", "added_bytes"), None, "added_bytes of a is a whole number"),
        (("costs", "a", "saved"), [["b", -8]], "the bytes that a saves of b is a whole .* not -8"),
        (("costs", "a", "saved"), [[3, 8]], "what a saves or reads the shape of is a text, not 3"),
        (("costs", "a", "weight_gradient_ms"), 3, "the backward of a takes 2.5 ms, its part .* 3"),
        (
            ("network", "pairs", "0>1", "bytes_per_ms"),
            0,
            "bytes_per_ms of the link 0>1 .* not 0",
        ),
        (("network", "link", "latency_ms"), -1, "latency_ms of the link is a number .*, not -1"),
        (("capacity_bytes",), 0, "capacity_bytes is a whole number .*, not 0"),
        (("capacity_bytes",), 2**63, "capacity_bytes is a whole number"),
        (("library_bytes",), -1, "library_bytes is a whole number .*, not -1"),
        (("batch",), 2.0, "batch is a whole number .*, not 2.0"),
        (("loss", "unused"), [3], "an output that the loss leaves unused is a text, not 3"),
        (("origin",), 3, "origin is a text, not 3"),
        (("device",), None, "device is a text, not None"),
        (("launch", "serial"), 2, "the serial share of launching is a number from 0 to 1, not 2"),
        (("launch", "forward_ms"), -1, "forward_ms of launching is a number .*, not -1"),
        (("loss", "ms"), -1, "ms of the loss is a number .*, not -1"),
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
