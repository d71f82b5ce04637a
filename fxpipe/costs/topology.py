"""Links by their makers' word, and which of them lie between the devices of a cluster."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fxpipe.errors import DeviceError
from fxpipe.ir import Link, Network

GB_PER_S = 1e6  # in bytes per millisecond

# What any message takes: 8.4 us to launch, and to cross NVLink, PCIe or a network, by NCCL's own
# tables for its ring with the Simple protocol, in which large messages go (src/graph/tuning.cc).
_NVLINK_MS, _PCIE_MS, _NETWORK_MS = 0.0118, 0.0141, 0.0180
# What a value that processes send by gloo takes from the work of either, and a byte of it; and how
# much later than need be a processor goes on that waits for a message, as no two keep pace, so that
# orders are better in which it is there before: benchmarks/messages.py, between two of one host.
_VALUE_MS, _BYTE_MS, _WAITING_MS = 0.2, 1 / (4 * GB_PER_S), 0.5


@dataclass(frozen=True, slots=True)
class Wire:
    """One kind of link: one direction of one device's share."""

    gb_per_s: float
    latency_ms: float
    source: str

    @property
    def link(self) -> Link:
        """As the simulator knows it."""
        return Link(self.latency_ms, GB_PER_S * self.gb_per_s)


def _nvlink(gb_per_s: float, source: str) -> Wire:
    return Wire(gb_per_s, _NVLINK_MS, source)


def _pcie(gigatransfers: float, share: float, source: str) -> Wire:
    """16 lanes, `share` of whose bits are data."""
    return Wire(gigatransfers * 16 / 8 * share, _PCIE_MS, source)


def _infiniband(gb_per_s: float, source: str) -> Wire:
    return Wire(gb_per_s, _NETWORK_MS, f"{source}; 4 lanes, one adapter a device")


def _ethernet(gigabits: float) -> Wire:
    # TCP through the host's kernel is slower than NCCL's table says of networks.
    return Wire(gigabits / 8, 0.05, "IEEE 802.3, one adapter a device; 50 us assumed")


WIRES: Mapping[str, Wire] = {
    "nvlink1": _nvlink(80, "NVIDIA Tesla P100 whitepaper: 4 links of 20 GB/s"),
    "nvlink2": _nvlink(150, "NVIDIA V100 data sheet: 6 links of 25 GB/s"),
    "nvlink3": _nvlink(300, "NVIDIA A100 data sheet: 12 links of 25 GB/s"),
    "nvlink4": _nvlink(450, "NVIDIA H100 data sheet: 18 links of 25 GB/s"),
    "nvlink5": _nvlink(900, "NVIDIA Blackwell architecture technical brief: 18 links of 50 GB/s"),
    "pcie3": _pcie(8, 128 / 130, "PCI Express base specification 3.0: 8 GT/s, 128b/130b"),
    "pcie4": _pcie(16, 128 / 130, "PCI Express base specification 4.0: 16 GT/s, 128b/130b"),
    "pcie5": _pcie(32, 128 / 130, "PCI Express base specification 5.0: 32 GT/s, 128b/130b"),
    "pcie6": _pcie(64, 236 / 256, "PCI Express base specification 6.0: 64 GT/s, 236 of 256 bytes"),
    "ib100": _infiniband(12.5, "InfiniBand Trade Association roadmap, EDR"),
    "ib200": _infiniband(25, "InfiniBand Trade Association roadmap, HDR"),
    "ib400": _infiniband(50, "InfiniBand Trade Association roadmap, NDR"),
    "ib800": _infiniband(100, "InfiniBand Trade Association roadmap, XDR"),
    **{f"eth{gigabits}": _ethernet(gigabits) for gigabits in (1, 10, 25, 40, 100, 200, 400, 800)},
}

_TOPOLOGY = re.compile(r"(?:(\d+)x)?(\d+):(\w+)(?:/(\w+))?")


def network_of(text: str, n_devices: int) -> Network:
    """The network of `4x8:nvlink4/ib400`: 4 nodes of 8 devices, the first link inside each.

    `8:nvlink4` is one node. Devices are numbered node by node. Raises DeviceError for text that is
    none, a link that is not known, or another number of devices than `n_devices`.
    """
    match = _TOPOLOGY.fullmatch(text.strip())
    if match is None:
        raise DeviceError(
            f"{text!r} is no topology: write 8:nvlink4 for one node of 8 devices, or "
            "4x8:nvlink4/ib400 for 4 of them and the link between"
        )
    n_nodes, n_each = int(match[1] or 1), int(match[2])
    if n_nodes * n_each != n_devices:
        raise DeviceError(
            f"the topology {text} has {n_nodes * n_each} devices, but --devices has {n_devices}: "
            "write as many of either"
        )
    inside = _link(match[3])
    if n_nodes == 1 and match[4] is None:
        return Network(inside)
    if match[4] is None:
        raise DeviceError(
            f"the topology {text} has {n_nodes} nodes and no link between them: name it, as in "
            f"{text}/ib400"
        )
    node = [k // n_each for k in range(n_devices)]
    devices = range(n_devices)
    return Network(
        _link(match[4]),
        {(a, b): inside for a in devices for b in devices if a != b and node[a] == node[b]},
    )


def between_processors(network: Network) -> Network:
    """The same links between processors, which have to do the sending themselves."""

    def busy(link: Link) -> Link:
        latency_ms = max(link.latency_ms, _WAITING_MS)
        return replace(link, latency_ms=latency_ms, value_ms=_VALUE_MS, byte_ms=_BYTE_MS)

    pairs = {pair: busy(link) for pair, link in network.pairs.items()}
    return Network(busy(network.link), pairs)


def _link(name: str) -> Link:
    if name not in WIRES:
        raise DeviceError(f"there is no link {name!r}: use one of {', '.join(WIRES)}")
    return WIRES[name].link
