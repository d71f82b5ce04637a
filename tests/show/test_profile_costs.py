"""What `fxpipe profile` prints."""

from dataclasses import replace

from shown import shown

from fxpipe.ir import Launch, Link, Network, OpCost, Profile
from fxpipe.show.profile import profile_json, profile_table

LANES = Profile(
    costs={"a": OpCost(1.0, 2.0), "b": OpCost(3.0, 4.0)},
    network=Network(Link(0.0, 1e6)),
    device="cpu",
    capacity_bytes=2**30,
    batch=2,
    fingerprint="f",
)


def test_what_the_host_launches_is_told_of_gpus_alone():
    assert profile_json(LANES)["launch"] is None
    assert "host" not in shown(profile_table(LANES))
    gpu = replace(LANES, device="cuda:0", launch=Launch(0.5, 0.25, 0.1, 0.2, 0.9))
    assert profile_json(gpu)["launch"] == {
        "forward_ms": 1.0,
        "backward_ms": 0.5,
        "loss_ms": 0.1,
        "action_ms": 0.2,
        "serial": 0.9,
    }
    assert "the host launches that in 1.00 ms and 0.50 ms" in shown(profile_table(gpu))
