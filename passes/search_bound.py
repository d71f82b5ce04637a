"""A lower bound on the step of every plan: any cuts, map, order, loops and recomputation.

Three reasons why a device must be idle, or the step must last, whatever the plan:

1. All work has to be done: m micro-batches of the chain's forward and backward, by p devices.
2. The k-th device to be reached can't begin before the forward of k atoms and k messages.
3. Until the first micro-batch has come to the chain's end and back to a device, that device can do
   forwards only; those of all devices together may not last so long.

And one atom's device does that atom's work m times, after the forwards of all before it.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir import Block, Chain, Network
from fxpipe.passes.partition_costs import crossing_bytes


def lower_bound_ms(
    chain: Chain,
    edges: tuple[int, ...],
    n_devices: int,
    n_microbatches: int,
    network: Network,
) -> float:
    """Milliseconds that no step of this chain on these devices can be shorter than.

    A stage begins at one of `edges`. Source of 3: the idle time of the zero-bubble schedules (Qi et
    al., ICLR 2024, section 2.3), here for stages of any size.
    """
    m = n_microbatches
    forward = _between(chain, edges, lambda block: block.forward_ms)
    backward = _between(chain, edges, lambda block: block.backward_ms)
    sent_back = _between(chain, edges, lambda block: block.backward_ms - block.weight_gradient_ms)
    work_ms = m * float(forward.sum() + backward.sum())
    message_ms = _least_message_ms(chain, edges, network)
    before = np.concatenate(([0.0], np.cumsum(forward)))
    after = np.concatenate(([0.0], np.cumsum(sent_back[::-1])))
    one_atom_ms = float((before[:-1] + m * (forward + backward)).max())
    bounds = []
    for used in range(1, min(n_devices, len(forward)) + 1):
        crossed = np.arange(used) * message_ms
        begins = float((before[:used] + crossed).sum())
        # The first micro-batch crosses used - 1 boundaries at least, then comes back.
        end_ms = float(before[-1]) + (used - 1) * message_ms
        returns = float((end_ms + after[:used] + crossed).sum())
        idle_ms = max(begins, returns - m * float(before[-1]))
        there_and_back_ms = end_ms + float(after[-1]) + (used - 1) * message_ms
        bounds.append(max((work_ms + idle_ms) / used, there_and_back_ms))
    # A plan may leave devices without a stage: the bound is that of the best number of them.
    return max(one_atom_ms, min(bounds)) * (1 - 1e-9)


def _between(
    chain: Chain, edges: tuple[int, ...], cost: Callable[[Block], float]
) -> NDArray[np.float64]:
    costs = np.concatenate(([0.0], np.cumsum([cost(block) for block in chain.blocks])))
    return np.diff(costs[list(edges)])


def _least_message_ms(chain: Chain, edges: tuple[int, ...], network: Network) -> float:
    """The shortest time in which anything goes from one device to another."""
    crossing = crossing_bytes(chain)
    least = min((crossing[edge] for edge in edges[1:-1]), default=0)
    links = (network.link, *network.pairs.values())
    return min(link.transfer_ms(least) for link in links) if least else 0.0
