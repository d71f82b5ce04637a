"""What devices that share a memory hold together, as one host launches what they do.

Memory is taken and given back as ops are launched, whenever they run. The threads of a host, one
for each device, take turns op by op: an action holds what it needs from when its thread could begin
to launch it until it is launched, which takes all the longer the more of them there are.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fxpipe.ir import Network
from fxpipe.passes.simulate import simulate
from fxpipe.passes.simulate_costs import Message, StageCost
from fxpipe.passes.simulate_launches import Launched
from fxpipe.schedule import Schedule


def together_bytes(
    schedule: Schedule,
    stages: Sequence[StageCost],
    messages: Sequence[Message],
    network: Network,
    recompute: Sequence[Sequence[bool]],
    launched: Launched,
) -> int:
    """The most that they hold, where actions take as long as it does to launch them."""
    until = np.stack((np.zeros_like(launched[1]), launched[1]))
    instant = [
        replace(
            cost,
            forward_ms=0.0,
            backward_ms=0.0,
            weight_gradient_ms=0.0,
            halving_ms=0.0,
            again_ms=0.0,
        )
        for cost in stages
    ]
    found = simulate(schedule, instant, messages, network, recompute, launched=until)
    changes: list[tuple[float, int]] = []
    for row in found.memory:
        before = 0
        for ms, n_bytes in row:
            changes.append((ms, n_bytes - before))
            before = n_bytes
    held = most = 0
    for _, change in sorted(changes):  # at one moment first what is given back
        held += change
        most = max(most, held)
    return most
