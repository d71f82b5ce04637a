"""Links as they are measured."""

import math

from fxpipe.costs.links import measure_network
from fxpipe.runtime.device_names import parse_devices


def test_cpu_lanes_hand_over_without_a_copy():
    network = measure_network(parse_devices("cpu*3"))
    assert network.pairs == {}
    assert network.between(0, 2).latency_ms > 0
    assert math.isinf(network.between(0, 2).bytes_per_ms)
