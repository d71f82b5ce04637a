"""Topologies: which link lies between two devices, and what is said of one that can't be."""

import pytest

from fxpipe.costs.topology import WIRES, between_processors, network_of
from fxpipe.errors import DeviceError


def test_devices_of_a_node_have_the_one_link_and_nodes_the_other():
    network = network_of("2x2:nvlink4/ib400", 4)
    ends = {(a, b): network.between(a, b) for a in range(4) for b in range(4) if a != b}
    inside = {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert {pair for pair, link in ends.items() if link == WIRES["nvlink4"].link} == inside
    assert {link for pair, link in ends.items() if pair not in inside} == {WIRES["ib400"].link}


def test_one_node():
    assert network_of("8:pcie4", 8).between(0, 7) == WIRES["pcie4"].link


def test_processors_spend_time_on_what_they_send_and_wait_for():
    network = between_processors(network_of("2x2:eth100/eth10", 4))
    for link, wire in ((network.between(0, 1), "eth100"), (network.between(1, 2), "eth10")):
        assert link.bytes_per_ms == WIRES[wire].link.bytes_per_ms
        assert link.latency_ms > WIRES[wire].link.latency_ms
        assert link.busy_ms(2, 10**6) > link.busy_ms(1, 10**6) > link.busy_ms(1, 0) > 0.0
    assert WIRES["eth10"].link.busy_ms(1, 10**6) == 0.0


def test_bytes_go_as_fast_as_the_makers_say():
    assert WIRES["nvlink4"].link.transfer_ms(450 * 10**6) == pytest.approx(1.0118)
    assert WIRES["pcie4"].gb_per_s == pytest.approx(31.5, abs=0.05)
    assert WIRES["eth100"].gb_per_s == WIRES["ib100"].gb_per_s == 12.5
    assert all(wire.source and wire.latency_ms > 0 for wire in WIRES.values())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4x8:nvlink4/ib400", "has 32 devices, but --devices has 8"),
        ("2x4:nvlink4", "2 nodes and no link between them"),
        ("8:nvlink9", "no link 'nvlink9': use one of nvlink1, .*pcie3, .*ib100, .*eth10"),
        ("8", "is no topology: write 8:nvlink4"),
        ("0x8:nvlink4/ib400", "has 0 devices"),
    ],
)
def test_what_can_not_be_is_told(text, says):
    with pytest.raises(DeviceError, match=says):
        network_of(text, 8)
